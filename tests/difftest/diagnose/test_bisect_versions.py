"""First bad released versions, from tiny wheels made on the spot, and builds in throw-away environments."""

import subprocess
import zipfile

import pytest

from difftest.diagnose import versions
from difftest.diagnose.environments import make_venv, plain_environment, venv_environment
from difftest.diagnose.ledger import Ledger
from difftest.diagnose.plans import VersionPlan, plan_to_json
from difftest.diagnose.trial import CannotJudge, Command, Place, Refused

WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
METADATA = "Metadata-Version: 2.1\nName: tinykernel\nVersion: {version}\n{more}"
VERDICT = "{python} -c 'import tinykernel, sys; sys.exit(tinykernel.fault)'"


def wheel(folder, version, text, more=""):
    info = f"tinykernel-{version}.dist-info"
    files = {
        "tinykernel.py": text,
        f"{info}/WHEEL": WHEEL,
        f"{info}/METADATA": METADATA.format(version=version, more=more),
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(folder / f"tinykernel-{version}-py3-none-any.whl", "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)


@pytest.fixture
def wheels(tmp_path):
    """Versions 0.5.1 to 0.5.10; 0.5.6 brings the fault, 0.5.4 needs a package that is not there."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for number in range(1, 11):
        needs = "Requires-Dist: no-such-package-of-that-name\n" if number == 4 else ""
        wheel(folder, f"0.5.{number}", f"fault = {int(number >= 6)}\n", needs)
    return folder


def plan_of(wheels, line=VERDICT, good="0.5.1", bad="0.5.10", **options):
    sources = ("--no-index", "--find-links", str(wheels))
    return VersionPlan("tinykernel", good, bad, Command(line), sources=sources, **options)


def search(plan, folder):
    return versions.bisect_versions(plan, Ledger.create(folder, plan_to_json(plan)))


def test_the_first_bad_version_of_wheels_with_one_that_does_not_install(wheels, tmp_path):
    outcome = search(plan_of(wheels, good="0.5.3", bad="0.5.6"), tmp_path / "run")
    assert (outcome.before, outcome.version) == ("0.5.5", "0.5.6")
    assert outcome.sentence() == "first bad version: 0.5.6 (last good: 0.5.5)"
    assert outcome.exit_code == 0
    assert any("build failed: ERROR" in step.words for step in outcome.steps if step.sha == "0.5.4")
    assert list((tmp_path / "run" / "venvs").iterdir()) == []


def test_versions_are_in_version_order(wheels):
    offered = versions.released_versions("tinykernel", ("--no-index", "--find-links", str(wheels)))
    assert offered == [f"0.5.{number}" for number in range(1, 11)]


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Searches of ten versions that need no pip: the verdict command looks at the version's number alone."""
    monkeypatch.setattr(versions, "released_versions", lambda *_: [f"0.5.{number}" for number in range(1, 11)])

    def place(self, version):
        words = {"version": version, "number": version.rsplit(".", 1)[1]}
        return Place(tmp_path, plain_environment(), words)

    monkeypatch.setattr(versions._Search, "_place", place)
    return tmp_path


@pytest.mark.parametrize("first_bad", range(2, 11))
def test_every_position_takes_at_most_4_verdicts(installed, first_bad):
    outcome = search(plan_of("", f"test $DIFFTEST_NUMBER -lt {first_bad}"), installed / "run")
    assert outcome.version == f"0.5.{first_bad}"
    assert outcome.verdicts <= 4


def test_skipped_versions_leave_several_possible(installed):
    line = "case $DIFFTEST_NUMBER in 4|5|6) exit 125;; esac; test $DIFFTEST_NUMBER -lt 6"
    outcome = search(plan_of("", line), installed / "run")
    assert outcome.possible == ["0.5.4", "0.5.5", "0.5.6", "0.5.7"]
    assert outcome.sentence() == "the first bad version is one of 4: those between could not be judged"
    assert outcome.exit_code == 125


def test_a_verdict_that_changes_its_mind_is_not_confirmed(installed):
    counter = installed / "asked"
    line = f"echo >> {counter}; test $DIFFTEST_NUMBER -lt 6 || test $(wc -l < {counter}) -gt 5"
    outcome = search(plan_of("", line), installed / "run")
    assert outcome.exit_code == 125
    assert outcome.sentence().endswith("(not confirmed)")
    assert "repeat seeds with --repeat always" in outcome.notes[0]


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"good": "0.4"}, Refused, "--good 0.4 is no version of tinykernel that pip offers; the nearest are 0.5"),
        ({"good": "0.5.10", "bad": "0.5.2"}, Refused, "--good 0.5.10 is newer than --bad 0.5.2: they look swapped"),
        ({"good": "0.5.2", "bad": "0.5.2"}, Refused, "--good and --bad are both 0.5.2"),
        ({"bad": "0.5.9"}, CannotJudge, "--bad 0.5.9 cannot be judged .exit code 125: no output"),
        ({"good": "0.5.7"}, CannotJudge, "--good 0.5.7 fails; name a version that passes"),
        ({"bad": "0.5.2"}, CannotJudge, "--bad 0.5.2 passes; name a version that fails"),
    ],
)
def test_bad_endpoints(installed, options, error, sentence):
    line = "test $DIFFTEST_NUMBER -ne 9 || exit 125; test $DIFFTEST_NUMBER -lt 6"
    with pytest.raises(error, match=sentence) as raised:
        search(plan_of("", line, **options), installed / "run")
    assert "\n" not in str(raised.value)


def test_a_package_that_pip_does_not_offer(tmp_path):
    with pytest.raises(CannotJudge, match=r"pip offers no version of tinykernel: ERROR: No matching distribution"):
        versions.released_versions("tinykernel", ("--no-index", "--find-links", str(tmp_path)))


@pytest.mark.parametrize(("overlay", "code"), [(True, 0), (False, 1)])
def test_an_overlay_sees_the_running_environment(tmp_path, overlay, code):
    python = make_venv(tmp_path / "venv", overlay)
    done = subprocess.run(
        [python, "-P", "-c", "import rich"], capture_output=True, env=venv_environment(tmp_path / "venv")
    )
    assert done.returncode == code


BACKEND = f"""
import pathlib, zipfile
def build_wheel(folder, *_):
    name = "tinykernel-1.0-py3-none-any.whl"
    with zipfile.ZipFile(pathlib.Path(folder, name), "w") as archive:
        archive.writestr("tinykernel.py", pathlib.Path("code.txt").read_text())
        archive.writestr("tinykernel-1.0.dist-info/WHEEL", {WHEEL!r})
        archive.writestr("tinykernel-1.0.dist-info/METADATA", {METADATA.format(version="1.0", more="")!r})
        archive.writestr("tinykernel-1.0.dist-info/RECORD", "")
    return name
def get_requires_for_build_wheel(*_):
    return []
"""
PROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


def test_every_commit_is_installed_into_an_environment_of_its_own(history, search, tmp_path):
    """The verdict runs outside the tree and reads only what the build installed."""
    history.commit("start", {"pyproject.toml": PROJECT, "backend.py": BACKEND, "code.txt": "fault = 0\n"})
    history.commit("second", {"code.txt": "fault = 1\n"})
    repo = history.write()
    line = "cd / && {python} -P -c 'import difftest, tinykernel, sys; sys.exit(tinykernel.fault)'"
    build = "pip install --quiet --no-index --force-reinstall --no-build-isolation ."
    outcome = search(repo, tmp_path / "run", line, good=repo.sha[1], build=build, venv=True)
    assert outcome.culprit.sha == repo.sha[2]
    with pytest.raises(ModuleNotFoundError):
        __import__("tinykernel")
