"""The command `difftest blame`."""

import json
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import typer
from rich.console import Console

from ..capture import SPEC, load_capture
from ..cases.case import Case
from ..paths.base import get_path
from ..reference.inputs import LayerInputs
from ..session import find_case
from ..testing import resolve_device
from .blame import ORACLE, LayerBlame, NotCovered, blame
from .blame_report import layer_lines, summary_lines
from .ddmin import Decided, decide
from .switches import HELP, Trials, parse

AGREES, DISAGREES, USAGE, CANNOT_JUDGE = 0, 1, 2, 125

LONG_CASE = 8192
"""Tokens from which on a case gains by several threads; in a shorter one they mostly wait for one another."""

console, errors = Console(), Console(stderr=True)


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def blame_command(
    case: Annotated[str, typer.Argument(help="A case of `difftest list cases`, or capture:FILE.")],
    path: Annotated[str, typer.Option(help="Path to explain; name or name:option=value.")],
    baseline: Annotated[str, typer.Option(help="Path whose stages are put in place of its own.")] = ORACLE,
    layer: Annotated[list[int] | None, typer.Option(help="Only this layer (repeatable); all of the case's.")] = None,
    device: Annotated[Device, typer.Option(help="Where paths run.")] = Device.auto,
    trace: Annotated[
        Path | None, typer.Option(help="Directory of a run with --keep all: use its traces, run nothing of the path.")
    ] = None,
    switch: Annotated[list[str] | None, typer.Option(help=f"What may be on or off (repeatable): {HELP}.")] = None,
    policy: Annotated[str, typer.Option(help="strict, default, exploratory, or a TOML file.")] = "default",
    seed: Annotated[int, typer.Option(help="Added to the case's seed, as in `difftest run`.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Say which stages to blame: those whose replacement by the oracle's restores the quality; a bug, or a format.

    Every stage is replaced alone, all but it, and in every mixture that matters. With --switch the same question is
    asked of environment variables, config values, path options and callables, by delta debugging.

    Exit codes: 0 nothing to blame, or a format that the policy allows; 1 a bug; 125 cannot judge; 2 usage.
    """
    try:
        named, captured = _case(case, seed)
        where = resolve_device(device.value)
        _check_path(path, saved=trace is not None)
        if switch and captured:
            raise ValueError("--switch needs a case that processes of their own can generate, not captured inputs")
        if switch:
            _switches(named, path, switch, layer or [], where, policy, as_json)
        found = blame(
            named,
            path,
            baseline,
            layers=layer or sorted(captured) or (),
            device=where,
            policy=policy,
            traces=trace,
            captured=captured,
            on_layer=_silent if as_json else _print,
        )
    except NotCovered as error:
        _stop(CANNOT_JUDGE, str(error))
    except ValueError as error:
        _stop(USAGE, str(error))
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    for line in [] if as_json else summary_lines(found):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(found.exit_code)


def _silent(found: LayerBlame) -> None:
    """Shows nothing."""


def _print(found: LayerBlame) -> None:
    for line in layer_lines(found):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _case(name: str, seed: int) -> tuple[Case, dict[int, LayerInputs]]:
    """A case, and its inputs by layer where they are captured ones."""
    captured = load_capture(name.removeprefix(SPEC)) if name.startswith(SPEC) else []
    case = captured[0][0] if captured else find_case(name)
    if sum(case.lengths) < LONG_CASE:
        torch.set_num_threads(1)
    return replace(case, base_seed=case.base_seed + seed), {inputs.layer: inputs for _, inputs in captured}


def _check_path(spec: str, saved: bool) -> None:
    """Exits where the path cannot run here and no traces of it are given."""
    available = get_path(spec).availability()
    if not available.ok and not saved:
        _stop(CANNOT_JUDGE, f"path {spec} cannot run here: {available.why}; {available.install}")


def _switches(
    case: Case, path: str, texts: list[str], layers: list[int], device: str, policy: str, as_json: bool
) -> NoReturn:
    switches = [parse(text) for text in dict.fromkeys(texts)]
    trials = Trials(case, path, switches, layers=layers, device=device, policy=policy)
    decided = decide([switch.text for switch in switches], trials.outcome)
    if as_json:
        typer.echo(json.dumps({**decided.to_json(), "trials": trials.to_json()}, indent=2))
    else:
        _show_switches(decided, trials)
    ends = {decided.none, decided.every}
    raise typer.Exit(DISAGREES if "fails" in ends else CANNOT_JUDGE if "other" in ends else AGREES)


def _show_switches(decided: Decided, trials: Trials) -> None:
    every = frozenset(trials.switches)
    width = max(len("every switch off"), *map(len, every))
    lines = [f"{'every switch off':<{width}}  {trials.trial(frozenset()).why}"]
    lines.append(f"{'every switch on':<{width}}  {trials.trial(every).why}")
    for name in trials.switches:
        lines.append(f"{name:<{width}}  alone {decided.alone[name]}, all but it {decided.without[name]}")
        if decided.alone[name] == "other":
            lines.append(f"{'':<{width}}  {trials.trial(frozenset({name})).why}")
    if decided.none == decided.every == "passes":
        lines.append("nothing to blame")
    else:
        lines += decided.sentences()
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _stop(code: int, message: str) -> NoReturn:
    errors.print(f"difftest: {message}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(code)
