"""The commands `difftest shrink` and `difftest replay`."""

import json
import time
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from ..capture import SPEC, load_capture
from ..cases.case import Case
from ..cases.generate import generate
from ..paths.base import Path as TestedPath
from ..paths.base import get_path
from ..policy import Policy, load_policy
from ..reference.inputs import LayerInputs
from ..session import find_case
from ..testing import resolve_device
from . import bundle as bundles
from .replay import Unavailable, replay
from .shrink import SECONDS, Flaky, NothingToShrink, Progress, Shrunk, shrink, sizes
from .simplify import complexity

DISAGREES, USAGE, CANNOT_JUDGE = 1, 2, 125
RUNS = Path("runs")

console, errors = Console(), Console(stderr=True)


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def shrink_command(
    case: Annotated[str, typer.Argument(help="A case of `difftest list cases`, capture:FILE, or a bundle.")],
    path: Annotated[str, typer.Option(help="Path that fails; a bundle's own by default.")] = "",
    layer: Annotated[int | None, typer.Option(help="Layer; the case's first that fails by default.")] = None,
    out: Annotated[Path | None, typer.Option(help="New directory for the bundle; under runs/ by default.")] = None,
    policy: Annotated[str, typer.Option(help="strict, default, exploratory, or a TOML file.")] = "default",
    seed: Annotated[int, typer.Option(help="Added to the case's seed, as in `difftest run`.")] = 0,
    seconds: Annotated[float, typer.Option(min=1.0, help="After so long the search stops where it is.")] = SECONDS,
    device: Annotated[Device, typer.Option(help="Where the path runs.")] = Device.auto,
    as_json: Annotated[bool, typer.Option("--json", help="Print the bundle's manifest as JSON.")] = False,
) -> None:
    """Find the smallest layer on which a path fails in the same way (stage, rule, sign), and write it as a bundle.

    Fewer requests, rows, entries, heads and dims, then simpler values; never another failure. The nearest layer that
    passes is kept with it.

    Exit codes: 1 it fails and the bundle is written, 0 nothing to shrink, 125 flaky or cannot judge, 2 usage.
    """
    try:
        made = _layers(case, layer, seed)
        spec = path or _own_path(case)
        tested = _ready(spec)
        chosen = load_policy(policy)
        where = resolve_device(device.value)
        _free(out)
        asked = bundles.Origin(*made[0][:2], spec, policy, where)
        found, origin = _first_failing(made, tested, asked, chosen, seconds)
    except NothingToShrink as error:
        _stop(error.exit_code, str(error))
    except (Flaky, Unavailable) as error:
        _stop(CANNOT_JUDGE, f"{error}; stopped shrinking" if isinstance(error, Flaky) else str(error))
    except (ValueError, FileExistsError) as error:
        _stop(USAGE, str(error))
    folder = bundles.write(out or _folder(origin), found, tested, origin)
    if as_json:
        typer.echo((folder / bundles.MANIFEST).read_text(), nl=False)
    else:
        show(found, folder)
    raise typer.Exit(DISAGREES)


def replay_command(
    bundle: Annotated[Path, typer.Argument(help="Directory that `difftest shrink` wrote.")],
    path: Annotated[str, typer.Option(help="Path to run it under; the one that failed by default.")] = "",
    passing: Annotated[bool, typer.Option("--passing", help="Run the nearest passing layer instead.")] = False,
    device: Annotated[Device | None, typer.Option(help="Where the path runs; as recorded by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> None:
    """Run a bundle again, under its own path or any other, and say whether it still fails in the same way.

    Nothing in the bundle is executed: its tensors are read, and the path comes from what is installed here.

    Exit codes: 0 agrees, 1 disagrees, 125 cannot judge (the path is missing or does not load), 2 usage.
    """
    try:
        where = resolve_device(device.value) if device else ""
        done = replay(bundles.load(bundle), path, where, passing)
    except Unavailable as error:
        _stop(CANNOT_JUDGE, str(error))
    except ValueError as error:
        _stop(USAGE, str(error))
    typer.echo(json.dumps(done.to_json(), indent=2) if as_json else done.text())
    raise typer.Exit(done.exit_code)


def _layers(name: str, layer: int | None, seed: int) -> list[tuple[Case, int, LayerInputs | None]]:
    """(case, layer, inputs if they are not generated) of what the user named."""
    if name.startswith(SPEC):
        every = [(case, inputs.layer, inputs) for case, inputs in load_capture(name)]
        return _asked(every, name, layer)  # type: ignore[arg-type]
    if (Path(name) / bundles.MANIFEST).is_file():
        read = bundles.load(Path(name))
        return [(read.case, read.inputs.layer, read.inputs)]
    case = find_case(name)
    case = replace(case, base_seed=case.base_seed + seed)
    if layer is not None and case.config.kind(layer) != case.config.kind(case.layers[0]):
        kind = case.config.kind(case.layers[0])
        raise ValueError(f"layer {layer} is {case.config.kind(layer)} and case {name} is for {kind} layers")
    return [(case, number, None) for number in ((layer,) if layer is not None else case.layers)]


def _asked(
    every: list[tuple[Case, int, LayerInputs | None]], name: str, layer: int | None
) -> list[tuple[Case, int, LayerInputs | None]]:
    found = [item for item in every if layer in (None, item[1])]
    if not found:
        raise ValueError(f"{name} holds no layer {layer}: it has {', '.join(str(number) for _, number, _ in every)}")
    return found


def _own_path(name: str) -> str:
    if (Path(name) / bundles.MANIFEST).is_file():
        return bundles.load(Path(name)).path
    raise ValueError("name the path that fails with --path; `difftest list paths` shows all")


def _ready(spec: str) -> TestedPath:
    path = get_path(spec)
    available = path.availability()
    if not available.ok:
        raise Unavailable(f"path {spec} cannot run here: {available.why}; {available.install}".rstrip("; "))
    return path


def _free(out: Path | None) -> None:
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} is not empty: a bundle never overwrites; name another --out or delete it")


def _folder(origin: bundles.Origin) -> Path:
    name = f"bundle-{origin.case.id}-layer{origin.layer}-{origin.spec}-{time.strftime('%Y%m%d-%H%M%S')}"
    return RUNS / "".join(letter if letter.isalnum() or letter in "-._" else "_" for letter in name)


def _first_failing(
    made: list[tuple[Case, int, LayerInputs | None]],
    path: TestedPath,
    origin: bundles.Origin,
    policy: Policy,
    seconds: float,
) -> tuple[Shrunk, bundles.Origin]:
    """The first of the layers that fails, shrunk. NothingToShrink, for the last reason, if none does."""
    nothing: NothingToShrink | None = None
    for case, layer, inputs in made:
        with errors.status(f"{escape(case.id)} layer {layer}: running it as it is") as status:
            try:
                found = shrink(
                    path,
                    generate(case, layer) if inputs is None else inputs,
                    case.id,
                    policy,
                    seconds=seconds,
                    device=origin.device,
                    on_progress=partial(_progress, status),
                )
            except NothingToShrink as error:
                nothing = error if nothing is None or error.exit_code else nothing
                continue
        return found, replace(origin, case=case, layer=layer)
    assert nothing is not None
    raise nothing


SHOWN = ("requests", "rows", "entries", "index heads", "attention heads", "values")


def _progress(status: Status, progress: Progress) -> None:
    size = ", ".join(f"{progress.size[name]:,} {name}" for name in SHOWN if name in progress.size)
    status.update(f"{progress.seconds:5.1f} s  {progress.tries} tries  {progress.doing}: {size}")


def show(found: Shrunk, folder: Path) -> None:
    """Prints what became smaller, the failure before and after, the neighbour, and what to do with the bundle."""

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    before, after = sizes(found.original.inputs), sizes(found.smallest.inputs)
    say(str(found.original.verdict))
    say("")
    for name, count in before.items():
        now = after.get(name, 0)
        say(f"  {name:<22}{count:>12,}" + (f"  -> {now:>8,}" if now != count else ""))
    say("")
    for name, words in complexity(found.smallest.inputs).items():
        if words not in ("zero", "one"):
            say(f"  {name:<22}{words}")
    say("  all other tensors are zero, norm weights one")
    say("")
    stopped = "" if found.finished else "; stopped before everything was tried"
    say(f"same failure ({found.signature.words()}) in {found.tries} tries, {found.seconds:.1f} s{stopped}:")
    say(f"  {found.smallest.verdict.text}")
    if found.neighbour:
        count = found.neighbour.distance
        differ = "1 value differs" if count == 1 else f"{count:,} values differ"
        say(f"passes with one change: {found.neighbour.change} ({differ})")
    else:
        say("no smaller or simpler layer passes: all that were tried fail, or cannot be judged")
    size = sum(file.stat().st_size for file in folder.iterdir())
    say(f"bundle: {folder} ({size / 1024:.0f} KiB)")
    say(f"run again: difftest replay {folder}")
    if (folder / bundles.SCRIPT).is_file():
        say(f"without difftest's judge: python {folder / bundles.SCRIPT}")


def _stop(code: int, message: str) -> NoReturn:
    stream = console if code == 0 else errors
    stream.print(f"difftest: {message}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(code)
