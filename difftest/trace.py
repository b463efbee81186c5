"""A trace: the stage tensors that one path produced for one case and one layer."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .stages import STAGES, StageName, check_stage

SCHEMA = "difftest.trace/1"
StageTensors = dict[str, Tensor]


@dataclass
class Trace:
    """Stage tensors by stage and name, with the facts needed to know what they are.

    Produced by a path (or read from disk), consumed by the comparisons, by `blame` and by anyone with safetensors.
    """

    case: str
    layer: int
    path: str
    stages: dict[StageName, StageTensors] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, stage: StageName) -> StageTensors:
        return self.stages[stage]

    def __contains__(self, stage: object) -> bool:
        return stage in self.stages

    def value(self, stage: StageName) -> Tensor:
        """The stage's main tensor (its first in the stage table)."""
        return self.stages[stage][next(iter(STAGES[stage].tensors))]

    def save(self, file: Path) -> None:
        """Writes the trace as safetensors, tensors named `stage.name`. A torn file never replaces a whole one."""
        tensors = {
            f"{stage}.{name}": tensor.detach().cpu().contiguous()
            for stage, parts in self.stages.items()
            for name, tensor in parts.items()
        }
        facts = {"schema": SCHEMA, "case": self.case, "layer": str(self.layer), "path": self.path}
        part = file.with_suffix(".part")
        save_file(tensors, part, metadata={**facts, "facts": json.dumps(self.facts, sort_keys=True)})
        part.replace(file)

    @classmethod
    def load(cls, file: Path, device: str | torch.device = "cpu") -> Self:
        """Reads a trace. ValueError names the file and what is wrong with it; nothing in the file is executed."""
        try:
            with safe_open(file, framework="pt", device=str(device)) as stored:
                facts = stored.metadata() or {}
                if facts.get("schema") != SCHEMA:
                    raise ValueError(
                        f"{file} is not a difftest trace: its schema is {facts.get('schema')!r}, not {SCHEMA!r}"
                    )
                trace = cls(facts["case"], int(facts["layer"]), facts["path"], facts=json.loads(facts["facts"]))
                for key in stored.keys():  # noqa: SIM118  safe_open is not a mapping
                    stage, _, name = key.partition(".")
                    trace.stages.setdefault(check_stage(stage), {})[name] = stored.get_tensor(key)
        except (SafetensorError, KeyError, OSError) as error:
            raise ValueError(f"{file} cannot be read as a trace: {error}; record it again or delete it") from error
        trace.stages = {stage: trace.stages[stage] for stage in STAGES if stage in trace.stages}
        return trace
