#!/usr/bin/env bash
# Installs the wheel and the sdist of DIST, each into a clean environment, and uses them away from the checkout.
# The dependencies come from PYTHON's environment, so nothing is downloaded. Usage: tests/package.sh DIST PYTHON
set -euo pipefail
dist=$(realpath "$1")
python=$(realpath -s "$2")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
libraries=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
for package in "$dist"/*.whl "$dist"/*.tar.gz; do
  echo "== $(basename "$package")"
  "$python" -m venv --without-pip "$work/venv"
  site=$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  # Last on the path, and without its editable difftest: what is tested must come from the package.
  mkdir "$work/libraries"
  for item in "$libraries"/*; do
    case $(basename "$item") in *difftest*) ;; *) ln -s "$item" "$work/libraries/" ;; esac
  done
  echo "$work/libraries" >"$site/libraries.pth"
  "$python" -m pip --python "$work/venv/bin/python" install -q --no-deps --no-build-isolation "$package"
  cd "$work"
  "$work/venv/bin/python" - "$site" <<'PY'
import sys
from importlib.resources import files
from pathlib import Path

import difftest
import difftest.cases
import difftest.kernels
import difftest.reference

site = Path(sys.argv[1])
for package in (difftest, difftest.reference, difftest.kernels, difftest.cases):
    assert Path(package.__path__[0]).is_relative_to(site), f"{package.__name__} comes from {package.__path__[0]}"
    assert (files(package) / "py.typed").is_file(), f"{package.__name__} has no py.typed"
for name in ("policies/default.toml", "report/templates/report.html.j2", "report/templates/report.css", "baseline_policies.toml"):
    assert (files(difftest) / name).is_file(), f"{name} is not in the package"
assert list((files(difftest.cases) / "recorded").iterdir()), "no recordings in the package"
PY
  "$work/venv/bin/difftest" doctor >/dev/null || [ $? -eq 128 ]
  "$work/venv/bin/difftest" run --case swa-1029 --layer 0 --path oracle --path deepseek --device cpu --out "$work/run" >/dev/null
  "$work/venv/bin/difftest" report "$work/run" --markdown | head -3
  "$work/venv/bin/python" -m pytest -q -p no:cacheprovider --pyargs difftest.suite --difftest-case swa-1029 --difftest-layer 0 --difftest-path oracle --difftest-device cpu
  cd "$dist"
  rm -rf "$work"/*
done
echo "both packages work"
