"""Plain tables: what `difftest list` and `difftest doctor` print."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ..cases import registry
from ..paths.base import path_classes
from ..stages import STAGES

Row = Mapping[str, Any]


def cases() -> list[Row]:
    return [
        {
            "case": case.id,
            "mode": case.mode,
            "tokens": " ".join(f"{length:,}" for length in case.lengths[:4])
            + (" ..." if len(case.lengths) > 4 else ""),
            "layers": " ".join(map(str, case.layers)),
            "profiles": " ".join(case.profiles),
            "says": case.says,
        }
        for case in registry.all_cases().values()
    ]


def paths() -> list[Row]:
    rows: list[Row] = []
    for name, kind in sorted(path_classes().items()):
        available = kind().availability()
        state = "ready" if available.ok else f"not here: {available.why}"
        rows.append({"path": name, "here": state, "to change that": available.install, "says": kind.says})
    return rows


def stages() -> list[Row]:
    return [
        {
            "stage": stage.name,
            "tensors": ", ".join(f"{name} {shape}" for name, shape in stage.tensors.items()),
            "reads": " ".join(stage.reads) or "inputs",
            "says": stage.says,
        }
        for stage in STAGES.values()
    ]


def show(rows: Sequence[Row], console: Console) -> None:
    """Prints rows as an aligned table, one column a key."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in rows[0] if rows else ():
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    console.print(table, markup=False)
