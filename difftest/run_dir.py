"""The directory a run leaves behind: `run.json`, `records.jsonl` and `traces/`."""

import json
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from .record import Record, append_records, read_records

SCHEMA = 1
MANIFEST = "run.json"
RECORDS = "records.jsonl"


@dataclass
class RunDir:
    """Produced by the runner, consumed by `judge`, `diff`, the reports and by people.

    `manifest` holds what was asked for, the environment, the cases' recipes, which paths were available, and `status`:
    running, complete, or interrupted. Everything judged comes from the records.
    """

    path: Path
    manifest: dict[str, Any]

    @classmethod
    def create(cls, path: Path, **facts: Any) -> Self:
        """Makes a new run directory. FileExistsError if `path` holds anything: a result is never overwritten."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise FileExistsError(f"{path} is not empty: a run never overwrites; name another --out or delete it")
        (path / "traces").mkdir(parents=True)
        run = cls(path, {"schema": SCHEMA, "status": "running", "started": time.strftime("%Y-%m-%dT%H:%M:%S"), **facts})
        run.write_manifest()
        return run

    @classmethod
    def open(cls, path: Path) -> Self:
        """Opens an existing run. ValueError names the file and what is wrong with it."""
        file = path / MANIFEST
        if not file.is_file():
            raise ValueError(f"{path} is not a run directory: it has no {MANIFEST}; give the --out of a difftest run")
        try:
            manifest = json.loads(file.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{file} is not whole JSON ({error}); the run's records can still be read") from error
        if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
            raise ValueError(f"{file} is not a difftest run of schema {SCHEMA}; run the cases again with this version")
        return cls(path, manifest)

    def write_manifest(self, **facts: Any) -> None:
        """Updates the manifest; the old file stays whole until the new one is."""
        self.manifest.update(facts)
        part = self.path / f"{MANIFEST}.part"
        part.write_text(json.dumps(self.manifest, indent=2, sort_keys=True) + "\n")
        part.replace(self.path / MANIFEST)

    def append(self, records: Iterable[Record]) -> None:
        append_records(self.path / RECORDS, records)

    def records(self) -> list[Record]:
        file = self.path / RECORDS
        return list(read_records(file)) if file.is_file() else []

    def trace_file(self, case: str, layer: int, path: str) -> Path:
        """Where a path's trace lies; what no file name should hold (`:` and `/` of a spec's options) becomes `_`."""
        return self.path / "traces" / re.sub(r"[^\w.@=,-]", "_", f"{case}-layer{layer}-{path}.safetensors")
