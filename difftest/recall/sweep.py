"""The in-process needle sweep: which planted entries each path and ablation still selects as the context grows."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..paths.base import get_path
from ..reference.config import load_config
from ..stages import nearest
from .curves import Curve, curves
from .sweep_cell import FILE, Cell, Key, Store, read_file
from .sweep_measure import measure, measure_exact
from .sweep_world import DISTRACTORS, World, WorldSpec, groups, make_world
from .variants import (
    CPU_PATHS,
    GPU_PATHS,
    TOPK,
    Variant,
    ablation_variants,
    check_ablations,
    path_variant,
)

LENGTHS = (338, 1000, 2048, 3611, 4509, 5294, 8000, 10498, 12000, 16384, 22597)
"""Lengths of the published needle runs and of the experiment they are compared with."""
FULL_LENGTHS = (*LENGTHS, 32768, 65536, 131072, 262144, 524288, 1048576)
DEPTHS = (0.05, 0.5, 0.95)
"""Start, middle and end, as shares of what the row sees."""
FULL_DEPTHS = tuple((place + 0.5) / 9 for place in range(9))
LAYERS, SEEDS = 3, 3
AHEAD = 3
"""Worlds made ahead for a GPU; each takes about 50 MB, a million-token one 1.3 GiB."""
PROFILES = ("default", "full")


@dataclass(frozen=True)
class SweepOptions:
    """What a sweep runs, after names were looked up.

    ks   index_topk values that every variant is measured with; the first is the model's own.
    """

    variants: tuple[Variant, ...]
    distractors: tuple[str, ...]
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    layers: tuple[int, ...]
    seeds: tuple[int, ...]
    ks: tuple[int, ...]
    device: str
    model: str = "v4-flash"
    skipped: dict[str, str] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        """What decides the data: a file is resumed only with the same. More variants, seeds or layers may be added."""
        return {"lengths": list(self.lengths), "depths": list(self.depths), "model": self.model}

    def worlds(self) -> list[WorldSpec]:
        return [
            WorldSpec(distractor, layer, seed, group, self.depths, self.model)
            for distractor in self.distractors
            for layer in self.layers
            for seed in self.seeds
            for group in groups(self.lengths)
        ]


def options_of(
    paths: Sequence[str],
    lengths: Sequence[int],
    depths: Sequence[float],
    layers: int,
    seeds: int,
    distractors: Sequence[str],
    ablations: Sequence[str],
    device: str,
    profile: str = "default",
    model: str = "v4-flash",
) -> SweepOptions:
    """Looks up every name; empty sequences and 0 mean the profile's own. ValueError says what is wrong."""
    if profile not in PROFILES:
        raise ValueError(f"unknown profile {profile!r}: choose {' or '.join(PROFILES)}")
    full = profile == "full"
    chosen_lengths = tuple(sorted(set(lengths or (FULL_LENGTHS if full else LENGTHS))))
    chosen_depths = tuple(sorted(set(depths or (FULL_DEPTHS if full else DEPTHS))))
    _check_numbers(chosen_lengths, chosen_depths, layers, seeds, model)
    named = _check_distractors(distractors) or (tuple(DISTRACTORS) if full else ("gaussian",))
    ablations_ = check_ablations(ablations)
    variants, skipped = open_variants(paths or (GPU_PATHS if device == "cuda" else CPU_PATHS))
    variants += ablation_variants(ablations_)
    own = load_config(model).index_topk
    ks = (own, *(k for k in TOPK if k != own)) if "topk" in ablations_ else (own,)
    return SweepOptions(
        tuple({variant.name: variant for variant in variants}.values()),
        named,
        chosen_lengths,
        chosen_depths,
        _spread(load_config(model).layers("csa"), layers or LAYERS),
        tuple(range(seeds or SEEDS)),
        ks,
        device,
        model,
        skipped,
    )


def _check_numbers(lengths: Sequence[int], depths: Sequence[float], layers: int, seeds: int, model: str) -> None:
    config = load_config(model)
    known, longest = len(config.layers("csa")), config.max_position_embeddings
    shortest = 8 * len(depths)
    for length in lengths:
        if not shortest <= length <= longest:
            raise ValueError(f"length {length} is outside {shortest} to {longest:,}: {len(depths)} needles have to fit")
    for depth in depths:
        if not 0 <= depth <= 1:
            raise ValueError(f"depth {depth} is no share: give 0 (start) to 1 (end)")
    if not 0 <= layers <= known:
        raise ValueError(f"--layers {layers}: {model} has {known} layers with an indexer; give 1 to {known}")
    if seeds < 0:
        raise ValueError(f"--seeds {seeds} is negative; give at least 1")


def _check_distractors(names: Sequence[str]) -> tuple[str, ...]:
    if "all" in names:
        return tuple(DISTRACTORS)
    for name in names:
        if name not in DISTRACTORS:
            raise ValueError(nearest(name, [*DISTRACTORS, "all"], "distractor model").split("? `")[0] + "?")
    return tuple(name for name in DISTRACTORS if name in names)


def open_variants(specs: Sequence[str]) -> tuple[list[Variant], dict[str, str]]:
    """Variants of the paths that can run here, and for the others why not."""
    ready, skipped = [], {}
    for spec in specs:
        variant = path_variant(spec)
        available = get_path(spec).availability()
        if available.ok:
            ready.append(variant)
        else:
            skipped[spec] = f"{available.why}; {available.install}" if available.install else available.why
    return ready, skipped


def _spread(layers: Sequence[int], count: int) -> tuple[int, ...]:
    """`count` of the layers, evenly spread from the first to the last."""
    if count == 1:
        return (layers[0],)
    return tuple(layers[round(place * (len(layers) - 1) / (count - 1))] for place in range(count))


@dataclass(frozen=True)
class SweepOutcome:
    """What a sweep found. `measured` cells were new and took `seconds`; the others were resumed.

    `exit_code`: 0 no path loses a needle that its formats must keep; 1 one does; 125 nothing could be judged, or a path
    raised.
    """

    cells: list[Cell]
    curves: list[Curve]
    measured: int = 0
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        paths = [curve for curve in self.curves if curve.group == "path"]
        if any(curve.unexplained for curve in paths):
            return 1
        judged = any(curve.exercised for curve in self.curves)
        return 125 if not judged or any(curve.error for curve in paths) else 0


def read(folder: Path) -> SweepOutcome:
    """What an earlier sweep left, whole or not. ValueError when there is none."""
    if not (folder / FILE).is_file():
        raise ValueError(f"{folder} holds no {FILE}; give the --out of a sweep")
    _, cells = read_file(folder / FILE)
    return SweepOutcome(cells, curves(cells))


def run(options: SweepOptions, folder: Path, progress_on: Console) -> SweepOutcome:
    """Sweeps into `folder`; what is there already is not measured again. ValueError: another sweep's folder."""
    started = time.monotonic()
    with Store(folder, options.settings()) as store:
        worlds = options.worlds()
        before = set(store.cells)
        wanted = {key for spec in worlds for variant in options.variants for key in _keys(spec, variant, options.ks)}
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=progress_on, transient=True, disable=not progress_on.is_terminal) as bar:
            task = bar.add_task("sweep", total=len(wanted))
            todo = [spec for spec in worlds if _missing(spec, options, store)]
            bar.update(task, completed=sum(key in store.cells for key in wanted))
            for world in _worlds(todo, options.device):
                spec = world.spec
                bar.update(task, description=f"{spec.distractor} layer {spec.layer} seed {spec.seed}")
                for _ in _sweep_world(world, options, store):
                    bar.update(task, completed=sum(key in store.cells for key in wanted))
        cells = [cell for key, found in store.cells.items() if key in wanted for cell in found]
        measured = sum(len(found) for key, found in store.cells.items() if key not in before)
    return SweepOutcome(cells, curves(cells), measured, time.monotonic() - started)


def _keys(spec: WorldSpec, variant: Variant, ks: Sequence[int]) -> list[Key]:
    return [(spec.distractor, spec.layer, spec.seed, variant.name, k, spec.lengths[-1]) for k in ks]


def _missing(spec: WorldSpec, options: SweepOptions, store: Store) -> list[Variant]:
    """The variants that the store lacks for a world."""
    return [v for v in options.variants if any(key not in store.cells for key in _keys(spec, v, options.ks))]


def _worlds(specs: Sequence[WorldSpec], device: str) -> Iterator[World]:
    """The worlds in order, each made when it is needed; for a GPU AHEAD are made on the CPU meanwhile."""
    if device == "cpu":
        yield from map(make_world, specs)
        return
    with ThreadPoolExecutor(AHEAD) as makers:
        ahead = [makers.submit(make_world, spec) for spec in specs[:AHEAD]]
        for place in range(len(specs)):
            world = ahead.pop(0).result()
            if place + AHEAD < len(specs):
                ahead.append(makers.submit(make_world, specs[place + AHEAD]))
            yield world.to(device)


def _sweep_world(world: World, options: SweepOptions, store: Store) -> Iterator[None]:
    """Measures what the store lacks of one world, a variant at a time."""
    spec = world.spec
    exacts = measure_exact(world, options.ks)
    for variant in _missing(spec, options, store):
        cells = measure(world, exacts, variant)
        for key in _keys(spec, variant, options.ks):
            if key not in store.cells:
                store.add(key, [cell for cell in cells if cell.k == key[4]])
        yield
