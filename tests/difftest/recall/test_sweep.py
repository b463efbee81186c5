"""The sweep end to end: planted bugs show a cliff and are named, fp8 alone does not, resume, bad input, exit codes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from difftest.reference.inputs import LayerInputs
from rich.console import Console
from typer.testing import CliRunner

from difftest.mutants.registry import plant
from difftest.paths.base import Path as AnyPath
from difftest.paths.sglang_fp8_model import SglangFp8Model
from difftest.recall import sweep, sweep_plot
from difftest.recall.cli import app
from difftest.recall.conclusion import conclusion
from difftest.recall.sweep import SweepOptions, SweepOutcome, options_of, run
from difftest.recall.sweep_cell import FILE, Cell, read_file
from difftest.recall.sweep_output import markdown_tables, write_curves
from difftest.recall.sweep_report import show_grid, show_summary
from difftest.recall.variants import HADAMARD, Variant
from difftest.stages import StageName
from difftest.trace import StageTensors, Trace

LENGTHS, DEPTHS = (1000, 3611, 5294, 10498), tuple((place + 0.5) / 9 for place in range(9))
quiet = Console(stderr=True, quiet=True)


def fp8(name: str = "fp8", group: str = "path") -> Variant:
    return Variant(name, group, "as it is", SglangFp8Model)  # type: ignore[arg-type]


def bug(name: str, group: str = "bugs") -> Variant:
    return Variant(name, group, "a planted fault", lambda: plant("sglang-fp8-model", name))  # type: ignore[arg-type]


def small(*variants: Variant, **changes: object) -> SweepOptions:
    made = options_of(["sglang-fp8-model"], LENGTHS, DEPTHS, 1, 2, [], [], "cpu")
    return replace(made, variants=variants, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> SweepOutcome:
    one_sided = next(variant for variant in HADAMARD if variant.name == "Hadamard on q only")
    options = small(fp8("fp8 q and K", "formats"), one_sided, bug("s1-tiled-reader"))
    return run(options, tmp_path_factory.mktemp("swept"), quiet)


@pytest.mark.parametrize("name", ["Hadamard on q only", "s1-tiled-reader"])
def test_a_planted_bug_falls_off_a_cliff_near_four_and_a_half_thousand(swept: SweepOutcome, name: str) -> None:
    curve = next(curve for curve in swept.curves if curve.variant == name)
    assert curve.shape == "cliff near 4.5k" and curve.lift < 0.3
    assert curve.unexplained > curve.lost * 0.9, "needles this clear cannot be lost to rounding"
    text = "\n".join(conclusion(swept.curves, swept.cells))
    assert name in next(line for line in text.splitlines() if line.startswith("- A cliff near 4.5k"))


def test_fp8_alone_does_not(swept: SweepOutcome) -> None:
    curve = next(curve for curve in swept.curves if curve.variant == "fp8 q and K")
    assert curve.shape == "no loss" and curve.total == 2 * 9 * 3
    text = "\n".join(conclusion(swept.curves, swept.cells))
    assert "fp8 alone does not produce a cliff near 4.5k" in text and "54 of 54" in text


def test_a_cell_holds_rank_margin_and_cost(swept: SweepOutcome) -> None:
    for cell in swept.cells:
        assert cell.result is not None
        assert (cell.result.margin is None) == (not cell.exercised)
        assert cell.visible == cell.length // 4 and 0 < cell.entry < cell.visible
        if cell.variant == "fp8 q and K":
            assert cell.result.selected and cell.result.rank == 1
            assert cell.result.margin is None or cell.result.margin > 1
            assert 0.3 < cell.result.mass < 1 and cell.result.loss > 0.2
    lost = [cell for cell in swept.cells if cell.result and not cell.result.selected]
    assert all(cell.result and cell.result.rank and cell.result.rank > 512 for cell in lost)
    assert min(cell.result.moved for cell in lost if cell.result) > 0.2, "losing a needle moves the output"


def test_the_grid_shows_lengths_depths_and_variants(swept: SweepOutcome) -> None:
    console = Console(width=200, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    show_grid(swept.cells, console)
    show_summary(swept.cells, console)
    text = console.export_text()
    assert "gaussian, index_topk 512: needles found" in text and "10,498" in text
    assert "54/54" in text and "least margin" in text and "lost up to" in text
    assert " all " in text and " 2/2 " in text and "s1-tiled-reader" in text


def test_curves_are_written_as_csv(swept: SweepOutcome, tmp_path: Path) -> None:
    write_curves(swept.curves, tmp_path / "curves.csv")
    lines = (tmp_path / "curves.csv").read_text().splitlines()
    assert len(lines) == 1 + 3 * len(LENGTHS)
    assert lines[1].startswith("gaussian,512,formats,fp8 q and K,1000,18,18,1.0000,False,")


def test_curves_are_written_as_markdown(swept: SweepOutcome) -> None:
    lines = markdown_tables(swept.curves)
    assert lines[0] == "**gaussian, index_topk 512**"
    assert lines[2] == "| variant | 3,611 | 5,294 | 10,498 | shape |"
    assert lines[4] == "| *at random* | *0.57* | *0.39* | *0.20* |  |"
    assert lines[5] == "| fp8 q and K | 1.00 | 1.00 | 1.00 | no loss |"


def test_exit_codes(swept: SweepOutcome, tmp_path: Path) -> None:
    assert swept.exit_code == 0, "an ablation decides nothing"
    broken = run(small(bug("s1-tiled-reader", "path"), lengths=(5294,), seeds=(0,)), tmp_path / "broken", quiet)
    assert broken.exit_code == 1, "a path that loses clear needles disagrees"
    short = run(small(fp8(), lengths=(1000,), seeds=(0,)), tmp_path / "short", quiet)
    assert short.exit_code == 125, "nothing had to be chosen"


class Raises(SglangFp8Model):
    def stage(self, stage: StageName, inputs: LayerInputs, trace: Trace) -> StageTensors:
        if stage == "score":
            raise RuntimeError("no such kernel\nand more")
        return super().stage(stage, inputs, trace)


def test_a_path_that_raises_cannot_be_judged_and_is_asked_again(tmp_path: Path) -> None:
    options = small(Variant("mine", "path", "raises", Raises), lengths=(2500,), seeds=(0,))
    outcome = run(options, tmp_path, quiet)
    assert outcome.exit_code == 125
    assert {cell.error for cell in outcome.cells} == {"RuntimeError: no such kernel"}
    mended = run(replace(options, variants=(fp8("mine"),)), tmp_path, quiet)
    assert mended.exit_code == 0 and all(cell.result for cell in mended.cells)


def test_an_interrupted_sweep_leaves_records_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = small(fp8(), lengths=(1000, 2500), seeds=(0, 1))
    opened: list[int] = []
    make_world = sweep.make_world

    def stop_at_the_second(spec: sweep.WorldSpec) -> sweep.World:
        opened.append(spec.seed)
        if len(opened) == 2:
            raise KeyboardInterrupt
        return make_world(spec)

    monkeypatch.setattr(sweep, "make_world", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        run(options, tmp_path, quiet)
    _, left = read_file(tmp_path / FILE)
    assert len(left) == 18 and {cell.seed for cell in left} == {0}
    with (tmp_path / FILE).open("a") as lines:
        lines.write('{"kind": "cell", "distractor": "gauss')
    opened.append(0)
    resumed = run(options, tmp_path, quiet)
    assert opened[3:] == [1], "the finished world is not made again"
    whole = run(options, tmp_path / "whole", quiet)
    assert sorted(map(Cell.to_json, resumed.cells)) == sorted(map(Cell.to_json, whole.cells))


def test_another_sweeps_folder_is_refused(tmp_path: Path) -> None:
    run(small(fp8(), lengths=(338,), seeds=(0,)), tmp_path, quiet)
    with pytest.raises(ValueError, match=r"made with lengths \[338\], and now it is \[1000\]"):
        run(small(fp8(), lengths=(1000,), seeds=(0,)), tmp_path, quiet)
    (tmp_path / FILE).write_text("not json\n\n")
    with pytest.raises(ValueError, match=r"sweep.jsonl:1 is not JSON"):
        run(small(fp8(), lengths=(338,), seeds=(0,)), tmp_path, quiet)


def cli(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["sweep", *words])
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--path", "sglang-fp8-modle"), "did you mean sglang-fp8-model"),
        (("--path", "bf16-k:colour=red"), "does not take 'colour=red'"),
        (("--distractor", "gausian"), "did you mean gaussian"),
        (("--ablation", "hadamart"), "did you mean hadamard"),
        (("--length", "many"), "--length 'many' is no whole number"),
        (("--length", "5"), "length 5 is outside 24 to 1,048,576"),
        (("--depth", "1.5"), "depth 1.5 is no share"),
        (("--layers", "99"), "v4-flash has 21 layers with an indexer"),
        (("--profile", "fast"), "choose default or full"),
        (("--picture", "gif"), "neither svg nor png"),
        (("--model", "v9"), "no model config v9"),
    ],
)
def test_bad_usage_is_one_sentence(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    code, output = cli(*words, "--out", str(tmp_path / "out"), "--device", "cpu")
    assert code == 2 and message in output and "Traceback" not in output
    assert not (tmp_path / "out").exists()


def test_the_command_writes_records_curves_conclusion_and_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason=sweep_plot.INSTALL)
    words = ("--path", "sglang-fp8-model", "--lengths", "1000,2500", "--layers", "1", "--seeds", "1")
    code, output = cli(
        *words, "--device", "cpu", "--out", str(tmp_path), "--json", "--picture", "png", "--picture", "svg"
    )
    assert code == 0
    found = json.loads(output)
    assert found["curves"][0]["recall"] == {"1000": [3, 3], "2500": [3, 3]}
    assert found["curves"][0]["shape"] == "no loss"
    assert found["conclusion"] == (tmp_path / "conclusion.md").read_text().splitlines()
    again = CliRunner().invoke(app, ["show", str(tmp_path)])
    assert again.exit_code == 0 and "No loss at all: sglang-fp8-model (3 of 3)" in again.output
    for name in ("recall-gaussian-path.svg", "recall-gaussian-path.png", "loss-by-margin.svg"):
        assert (tmp_path / name).stat().st_size > 1000


def test_without_matplotlib_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise sweep_plot.NoMatplotlib(f"no pictures: matplotlib is not installed; {sweep_plot.INSTALL}")

    monkeypatch.setattr(sweep_plot, "_pyplot", absent)
    words = ("--path", "sglang-fp8-model", "--length", "2500", "--layers", "1", "--seeds", "1", "--device", "cpu")
    code, output = cli(*words, "--out", str(tmp_path))
    assert code == 0 and 'pip install "difftest[plots]"' in output
    assert (tmp_path / "conclusion.md").is_file() and not list(tmp_path.glob("*.svg"))


def test_a_path_that_cannot_run_here_cannot_be_judged(tmp_path: Path) -> None:
    if SglangLive().availability().ok:
        pytest.skip("SGLang runs here")
    words = ("--path", "sglang-fp8", "--path", "sglang-fp8-model", "--length", "2500", "--layers", "1", "--seeds", "1")
    code, output = cli(*words, "--device", "cpu", "--out", str(tmp_path))
    assert code == 125 and "sglang-fp8 is left out" in output


def SglangLive() -> AnyPath:
    from difftest.paths.base import get_path

    return get_path("sglang-fp8")


def test_a_folder_without_a_sweep_cannot_be_shown(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["show", str(tmp_path)])
    assert result.exit_code == 2 and "holds no sweep.jsonl" in result.output


def test_profiles() -> None:
    plain, full = (options_of([], [], [], 0, 0, [], [], "cpu", profile) for profile in ("default", "full"))
    assert plain.lengths == sweep.LENGTHS and len(plain.depths) == 3 and plain.distractors == ("gaussian",)
    assert len(plain.variants) == 5 and len(plain.layers) == 3 and len(plain.seeds) == 3
    cells = len(plain.lengths) * len(plain.depths) * len(plain.variants) * len(plain.layers) * len(plain.seeds)
    assert cells == 11 * 3 * 5 * 3 * 3
    assert full.lengths[-1] == 1048576 and len(full.depths) == 9 and len(full.distractors) == 5
    both = options_of([], [], [], 0, 0, [], ["all"], "cpu")
    assert both.ks == (512, 1024) and len(both.variants) > 60


def test_layers_are_csa_and_spread() -> None:
    options = options_of([], [], [], 3, 1, [], [], "cpu")
    assert options.layers == (2, 22, 42)
    assert options_of([], [], [], 1, 1, [], [], "cpu", model="v4-pro").ks == (1024,)
