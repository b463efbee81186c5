"""Recorded traces as a path: what a path computed on another machine, judged here like any other."""

import hashlib
from dataclasses import fields
from functools import cached_property, lru_cache
from pathlib import Path as File

import torch
from torch import Tensor

from .. import cases
from ..reference.inputs import CompressorInputs, LayerInputs
from ..stages import STAGES, StageName
from ..trace import StageTensors, Trace
from ._recorded_format import expand
from .base import Availability, CannotFeed, Declaration, Path, path_points

SHIPPED = File(cases.__file__).parent / "recorded"
INPUTS_FACT = "inputs_sha256"
"""Fact of a recording: `fingerprint` of the inputs it was made from."""


def recording_file(folder: File, case: str, layer: int) -> File:
    """Where the recording of a case and layer lies in `folder`."""
    return folder / f"{case}-layer{layer}.safetensors"


def fingerprint(inputs: LayerInputs) -> str:
    """sha256 over names, dtypes, shapes and bytes of every tensor of `inputs`, in field order."""
    digest = hashlib.sha256()
    for field in fields(inputs):
        value = getattr(inputs, field.name)
        if isinstance(value, CompressorInputs):
            for part in fields(value):
                _feed(digest, f"{field.name}.{part.name}", getattr(value, part.name))
        elif isinstance(value, Tensor):
            _feed(digest, field.name, value)
    return digest.hexdigest()


def _feed(digest: "hashlib._Hash", name: str, tensor: Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())


class Recorded(Path):
    """The recordings of one path in one folder; the registered one is `sglang-fp8@recorded`.

    A recording is a saved `Trace`. Its facts (recipe, versions, GPU, date) are copied into every trace that this path
    fills. `has` says whether a case and layer were recorded; a stage asked of one that was not raises ValueError.
    """

    name = "sglang-fp8@recorded"
    says = "what SGLang's CUDA fp8 kernels computed on a GPU, read from disk"

    def __init__(self, folder: str | File = SHIPPED, of: str = "sglang-fp8") -> None:
        self.folder = File(folder)
        self.of = of
        self.name = f"{of}@recorded"

    @cached_property
    def declares(self) -> Declaration:  # type: ignore[override]
        """What the recorded path declares; ValueError if that path is not registered."""
        return _declaration(self.of)

    def availability(self) -> Availability:
        if any(self.folder.glob("*.safetensors")):
            return Availability(True)
        return Availability(False, f"no recordings in {self.folder}", "difftest record on a machine with a GPU")

    def has(self, case: str, layer: int) -> bool:
        """Whether this case and layer were recorded."""
        return recording_file(self.folder, case, layer).is_file()

    def recording(self, case: str, layer: int) -> Trace:
        """The recorded trace; ValueError if there is none, or if it is another path's."""
        if not self.has(case, layer):
            raise ValueError(f"{case} layer {layer} was not recorded in {self.folder}: run `difftest record` on a GPU")
        file = recording_file(self.folder, case, layer)
        trace = _load(file, file.stat().st_mtime_ns)
        if trace.path != self.of:
            raise ValueError(f"{file} was recorded from path {trace.path!r}, not {self.of!r}: choose another folder")
        return trace

    def stage(self, stage: StageName, inputs: LayerInputs, trace: Trace) -> StageTensors:
        """The recorded tensors of `stage`, on the inputs' device.

        ValueError if the recording was made from other inputs; CannotFeed if an upstream stage in `trace` is not the
        recorded one, since a recording cannot be computed again.
        """
        recorded = self.recording(trace.case, inputs.layer)
        expected = recorded.facts.get(INPUTS_FACT)
        if expected and not trace.facts.get(INPUTS_FACT) and fingerprint(inputs) != expected:
            raise ValueError(f"{trace.case} layer {inputs.layer} was recorded from other inputs: record the case again")
        trace.facts.update(recorded.facts)
        for upstream in STAGES[stage].reads:
            if upstream in trace and upstream in recorded and not _same(trace[upstream], recorded[upstream]):
                raise CannotFeed(f"stage {stage} was recorded and cannot be computed from another path's {upstream}")
        if stage not in recorded:
            raise ValueError(
                f"the recording of {trace.case} layer {inputs.layer} has no stage {stage}: record it again"
            )
        return {name: tensor.to(inputs.row_position.device) for name, tensor in recorded[stage].items()}


def _same(given: StageTensors, recorded: StageTensors) -> bool:
    return all(
        name in given and torch.equal(given[name].cpu().nan_to_num(), tensor.nan_to_num())
        for name, tensor in recorded.items()
        if name in ("value", "window", "compressed")
    )


@lru_cache(maxsize=2)
def _load(file: File, modified: int) -> Trace:
    return expand(Trace.load(file))


def _declaration(name: str) -> Declaration:
    """What the recorded path declares, from its registered class (which need not be able to run here)."""
    points = path_points()
    if name not in points:
        raise ValueError(
            f"path {name!r} is not registered, so its recordings cannot be judged: install what provides it"
        )
    declares: Declaration = points[name].load().declares
    return declares
