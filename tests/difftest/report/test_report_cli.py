import subprocess
import sys

from typer.testing import CliRunner

from difftest.cli import app
from difftest.light import LIGHT
from difftest.run_dir import RunDir

from .conftest import isolated, picks

runner = CliRunner()


def report(*arguments):
    return runner.invoke(app, ["report", *map(str, arguments)])


def test_one_form_is_needed(run_dir):
    assert report(run_dir()).exit_code == 2
    assert report(run_dir("b"), "--html", "--junit").exit_code == 2


def test_a_folder_without_results_is_named(tmp_path):
    result = report(tmp_path, "--markdown")
    assert result.exit_code == 2
    assert "holds no result: give the --out of difftest run" in result.stderr


def test_the_gate_is_the_verdict(run_dir, tmp_path):
    green, red = run_dir("green"), run_dir("red", bug=True)
    out = tmp_path / "made" / "summary.md"
    assert report(green, "--markdown", "--out", out, "--gate").exit_code == 0
    assert out.read_text().startswith("### ✅")
    assert report(red, "--markdown").exit_code == 0
    assert report(red, "--markdown", "--gate").exit_code == 1
    assert report(red, "--junit", "--policy", "nosuch").exit_code == 2


def test_runs_of_a_head_against_those_of_its_base(run_dir, tmp_path):
    for seed in range(12):
        for side, recall in (("base", 0.99), ("head", 0.90)):
            made = [
                isolated("gaussian-2117", 2, "bf16-k", "topk"),
                picks("gaussian-2117", 2, "bf16-k", recall + seed / 1e4),
            ]
            folder = run_dir(f"{side}-{seed}", found=made)
            cases = {"gaussian-2117": {"lengths": [2117], "base_seed": seed}}
            RunDir.open(folder).write_manifest(cases=cases)
            (tmp_path / side).mkdir(exist_ok=True)
            folder.rename(tmp_path / side / f"seed-{seed}")
    result = report(tmp_path / "head", "--markdown", "--base", tmp_path / "base", "--gate")
    assert result.exit_code == 1
    assert "**Against the base branch**: worse than the base: gaussian-2117 layer 2 bf16-k topk recall" in result.stdout
    assert "| -0.09 |" in result.stdout


def test_missing_plots_say_what_to_install(run_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    result = report(run_dir(), "--html")
    assert result.exit_code == 125
    assert 'pip install "difftest[report]"' in result.stderr


def test_a_report_needs_no_torch(run_dir):
    code = "import sys; from difftest.light import main; sys.argv = ['difftest', 'report', sys.argv[1], '--junit']\n"
    code += "try:\n    main()\nfinally:\n    print('torch' in sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-P", "-c", code, str(run_dir())], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("<?xml")
    assert done.stderr.split() == ["False"]


def test_light_commands_are_commands_of_the_whole_application():
    names = {command.name for command in app.registered_commands}
    assert set(LIGHT) <= names
