"""Compares two runs of serve.py: greedy outputs, and the indexer's picks of every token as sets.

Usage: compare_servers.py FOLDER OFF ON
"""

import json
import sys
from pathlib import Path

import numpy as np
from serve import PROMPTS

LAYERS = 2
"""Layers of the tiny model that have an indexer."""
TOPK = 512


def main(folder: Path, off: str, on: str) -> None:
    said = {name: json.loads((folder / f"{name}.json").read_text()) for name in (off, on)}
    picks = {name: np.load(folder / f"{name}.npz") for name in (off, on)}
    for key in (key for key in said[off] if "," in key):
        one, two = said[off][key]["output"], said[on][key]["output"]
        line = f"{key:24} outputs equal {sum(a == b for a, b in zip(one, two, strict=True))}/{len(one)}"
        if key in picks[off].files:
            rows = LAYERS * PROMPTS[key.split(",")[0]]
            overlap = shared(*(picks[name][key].reshape(-1, TOPK)[:rows] for name in (off, on)))
            line += f"  picks shared: mean {overlap.mean():.4f}, worst {overlap.min():.4f}, over {len(overlap)} rows"
        print(line)
    for key in ("info", "prefill seconds", "decode step seconds"):
        print(f"{key:24} {off} {said[off][key]}  {on} {said[on][key]}")


def shared(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """Share of each row's picks in `one` [rows, k] that `two` has too, for rows that had to choose.

    Rows of the prompt only: past the first answer that differs, the servers read different tokens.
    """
    sets = [(set(a[a >= 0].tolist()), set(b[b >= 0].tolist())) for a, b in zip(one, two, strict=True)]
    chosen = [(a, b) for a, b in sets if len(a) == TOPK and max(a) >= TOPK]
    return np.array([len(a & b) / TOPK for a, b in chosen] or [1.0])


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
