"""`difftest weights`, `difftest capture` and `difftest census`: real data, and what a format will cost."""

import json
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from .capture import Capture, capture_file, captured_case, load_captures, source_tensors
from .census import Census, take_census
from .dumper_import import read_traffic
from .layer_data import make_inputs, random_hidden
from .weights import Checkpoint

USAGE = 2
DEFAULT_LENGTH = 4509
"""Tokens of random hidden states: past the 2,048 up to which index_topk 512 selects everything."""

console, errors = Console(), Console(stderr=True)
capture_app = typer.Typer(no_args_is_help=True, help="Captured inputs of live layers.")


@capture_app.callback()
def capture_group() -> None:
    """Captured inputs of live layers."""


def stop(message: str) -> NoReturn:
    errors.print(f"difftest: {message}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(USAGE)


def weights_command(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a sharded DeepSeek-V4 checkpoint.")],
    layer: Annotated[
        list[int] | None, typer.Option(help="Layer to read (repeatable); the first csa layer if none.")
    ] = None,
    length: Annotated[int, typer.Option(min=1, help="Tokens of random hidden states.")] = DEFAULT_LENGTH,
    rows: Annotated[int, typer.Option(min=1, help="Query tokens that are compared.")] = 32,
    out: Annotated[Path, typer.Option(help="Folder of the captures.")] = Path("captures"),
) -> None:
    """Read a checkpoint's attention, compressor and indexer tensors of single layers and make captures from them."""
    try:
        source = Checkpoint(checkpoint)
        for number in layer or source.config.layers("csa")[:1]:
            weights = source.layer(number)
            name = f"{checkpoint.resolve().name}-layer-{number}"
            case = captured_case(name, (length,), number, str(checkpoint / "config.json"), rows)
            inputs = make_inputs(weights, random_hidden(case, number, source.config.hidden_size), case)
            origin = f"checkpoint {checkpoint.resolve().name}, random hidden states"
            file = capture_file(out, number)
            Capture(case, inputs, origin).save(file)
            console.print(f"layer {number} ({weights.kind}): {len(weights.tensors)} tensors read, {file} written")
    except (ValueError, OSError) as error:
        stop(str(error))


@capture_app.command("import")
def capture_import(
    dump: Annotated[Path, typer.Argument(help="Folder written by SGLang's dumper.")],
    weights: Annotated[Path, typer.Option(help="The checkpoint that was served.")],
    layer: Annotated[
        list[int] | None, typer.Option(help="Layer to import (repeatable); all that were dumped if none.")
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="Rank whose files are read.")] = 0,
    requests: Annotated[int, typer.Option(min=1, help="How many of the longest requests are kept.")] = 1,
    rows: Annotated[int, typer.Option(min=1, help="Query tokens that are compared.")] = 32,
    keep_hidden: Annotated[
        bool,
        typer.Option("--keep-hidden/--no-keep-hidden", help="Keep hidden states and query latents in the capture."),
    ] = True,
    out: Annotated[Path, typer.Option(help="Folder of the captures.")] = Path("captures"),
) -> None:
    """Make captures from hidden states that SGLang's dumper wrote, with the weights of the served checkpoint."""
    try:
        source = Checkpoint(weights)
        traffic = read_traffic(dump, tuple(layer or ()), rank, requests)
        for number, hidden in traffic.hidden.items():
            name = f"{dump.resolve().name}-layer-{number}"
            case = captured_case(name, traffic.lengths, number, str(weights / "config.json"), rows)
            inputs = make_inputs(
                source.layer(number), hidden, case, q_latent=traffic.q_latent.get(number), steps=traffic.steps
            )
            file = capture_file(out, number)
            kept = source_tensors(hidden, traffic.q_latent.get(number)) if keep_hidden else {}
            Capture(case, inputs, f"dump {dump.resolve().name}", source=kept).save(file)
            console.print(f"layer {number}: {traffic.lengths} tokens in {len(traffic.steps)} steps, {file} written")
    except (ValueError, OSError) as error:
        stop(str(error))


def census_command(
    source: Annotated[Path, typer.Argument(help="Captures (a folder or a file) or a checkpoint's folder.")],
    layer: Annotated[list[int] | None, typer.Option(help="Layer (repeatable); all if none.")] = None,
    length: Annotated[int, typer.Option(min=1, help="Tokens, for a checkpoint.")] = DEFAULT_LENGTH,
    rows: Annotated[int, typer.Option(min=1, help="Query tokens, for a checkpoint.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line a layer.")] = False,
) -> None:
    """Tell what fp8, bf16 and fp4 index keys will cost on captured or checkpoint data: keys, cut, expected recall."""
    try:
        if source.is_dir() and not any(source.glob("layer-*.safetensors")):
            found = _checkpoint_census(source, layer, length, rows)
        else:
            captures = [one for one in load_captures(source) if not layer or one.inputs.layer in layer]
            found = [take_census(one.case.id, one.inputs) for one in captures if one.inputs.kind == "csa"]
        if not found:
            raise ValueError(f"{source} holds no csa layer{' of those' if layer else ''}")
    except (ValueError, OSError) as error:
        stop(str(error))
    if as_json:
        for one in found:
            typer.echo(json.dumps(one.to_json()))
        return
    for one in found:
        _show(one)


def _checkpoint_census(folder: Path, layers: list[int] | None, length: int, rows: int) -> list[Census]:
    source, found = Checkpoint(folder), []
    present = set(source.layers())
    for number in layers or [one for one in source.config.layers("csa") if one in present]:
        name = f"{folder.resolve().name}-layer-{number}"
        case = captured_case(name, (length,), number, str(folder / "config.json"), rows)
        hidden = random_hidden(case, number, source.config.hidden_size)
        found.append(take_census(case.id, make_inputs(source.layer(number), hidden, case)))
    return found


def _show(one: Census) -> None:
    keys = one.keys
    console.print(f"{one.name}, {one.rows} rows", markup=False, highlight=False)
    console.print(
        f"  keys      rms {keys.rms:.4g}  largest {keys.largest:.4g}  crest {keys.crest:.2f} (before Hadamard "
        f"{keys.before:.2f})  spread of scales {keys.spread:.2f}  under the floor {keys.floored:.2%}",
        highlight=False,
        soft_wrap=True,
    )
    if one.boundary is None:
        console.print(f"  {one.note}", highlight=False)
        return
    cut = one.boundary
    console.print(
        f"  the cut   median gap {cut.gap:.3g} of the spread of scores  tied {cut.tied:.1%}, in bf16 scores "
        f"{cut.tied_bf16:.1%} with {cut.equal_bf16:.1f} equal",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    for title in ("  expected recall", "mean", "p1", "worst"):
        table.add_column(title, justify="left" if title.startswith(" ") else "right")
    for share in one.recalls:
        table.add_row(f"  {share.format}", *(f"{value:.4f}" for value in (share.mean, share.low, share.worst)))
    console.print(table)
