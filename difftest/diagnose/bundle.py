"""A bundle: the smallest failing layer as a directory that can be rerun, read and judged anywhere.

    bundle.json           recipe, path, failure, what was made smaller, environment, and a checksum of every other file
    inputs.safetensors    the layer's inputs, as a capture (`difftest.capture`); config.json its model's constants
    got.safetensors       the path's stages up to the failing one, as a trace
    expected.safetensors  for every element of the failing stage the exact value and the ends of what passes
    passing.safetensors   the nearest layer that passes, as a capture, if one was met
    records.jsonl         the measured records, which `judge` can read again
    repro.py              a page that needs torch and the path's own module

Written by `shrink`, read by `replay` and `bisect`. Reading one executes nothing in it.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..capture import CONFIG_FILE, Capture, load_file
from ..cases.case import Case
from ..environment import environment
from ..paths.base import Path as TestedPath
from ..paths.base import get_path
from ..policy import SHIPPED, Policy, load_policy
from ..record import append_records
from ..reference.inputs import LayerInputs
from ..text import place
from ..trace import Trace
from .intervals import limits_of, outside
from .repro import maker, script
from .shrink import Shrunk, sizes
from .signature import Examined, Signature
from .simplify import complexity

SCHEMA = "difftest.bundle/1"
MANIFEST = "bundle.json"
INPUTS, GOT, EXPECTED, PASSING = (f"{name}.safetensors" for name in ("inputs", "got", "expected", "passing"))
RECORDS, SCRIPT, POLICY = "records.jsonl", "repro.py", "policy.toml"


@dataclass(frozen=True)
class Origin:
    """What was shrunk: the case's recipe and layer, the path by its spec, the policy by name or file, the device."""

    case: Case
    layer: int
    spec: str
    policy: str = "default"
    device: str = "cpu"


@dataclass(frozen=True)
class Bundle:
    """A bundle that was read and found whole.

    facts   its manifest.   case, inputs   of the failing layer.   passing   inputs of the neighbour, or None.
    """

    folder: Path
    facts: Mapping[str, Any]
    signature: Signature
    case: Case
    inputs: LayerInputs
    passing: LayerInputs | None

    @property
    def path(self) -> str:
        return str(self.facts["path"])

    def policy(self) -> Policy:
        """The policy under which it fails: shipped, or the bundle's own file."""
        own = self.folder / POLICY
        return load_policy(own if POLICY in self.facts["files"] else self.facts["policy"])


def write(folder: Path, shrunk: Shrunk, path: TestedPath, origin: Origin) -> Path:
    """Writes a bundle into `folder`, which must not exist or be empty (FileExistsError); returns `folder`."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is not empty: a bundle never overwrites; name another --out or delete it")
    folder.mkdir(parents=True, exist_ok=True)
    seen = shrunk.smallest
    said = f"shrunk from {origin.case.id}, layer {origin.layer}, under {origin.spec or path.name}"
    if shrunk.neighbour:
        inputs = shrunk.neighbour.inputs
        Capture(_small_case(origin, inputs), inputs, f"{said}; {shrunk.neighbour.change}").save(folder / PASSING)
    Capture(_small_case(origin, seen.inputs), seen.inputs, said).save(folder / INPUTS)
    seen.trace.save(folder / GOT)
    expected = _expected(seen, path)
    save_file(expected, folder / EXPECTED)
    append_records(folder / RECORDS, seen.records)
    made = maker(path, origin.spec)
    if made:
        off = outside(seen.trace.stages.get(shrunk.signature.stage, {}), expected)
        title = f"{origin.case.id}, layer {origin.layer}, {origin.spec or path.name}: {seen.verdict.headline}"
        (folder / SCRIPT).write_text(script(made, shrunk.signature, title, seen.verdict.why, origin.device, off))
    if origin.policy not in SHIPPED:
        (folder / POLICY).write_text(Path(origin.policy).read_text())
    (folder / MANIFEST).write_text(json.dumps(_manifest(folder, shrunk, path, origin), indent=2) + "\n")
    return folder


def load(folder: Path) -> Bundle:
    """Reads a bundle. ValueError names, in one sentence, what is missing, cut short, changed or foreign."""
    facts = _read_manifest(folder)
    for name, wanted in facts["files"].items():
        _check_file(folder, name, wanted)
    capture = load_file(folder / INPUTS)
    passing = load_file(folder / PASSING).inputs if PASSING in facts["files"] else None
    return Bundle(folder, facts, Signature.from_json(facts["signature"]), capture.case, capture.inputs, passing)


def _read_manifest(folder: Path) -> dict[str, Any]:
    file = folder / MANIFEST
    if not file.is_file():
        raise ValueError(f"{folder} is no bundle: it has no {MANIFEST}; give a directory that `difftest shrink` wrote")
    try:
        facts = json.loads(file.read_text())
        if not isinstance(facts, dict) or facts.get("schema") != SCHEMA:
            found = facts.get("schema") if isinstance(facts, dict) else type(facts).__name__
            raise ValueError(f"its schema is {found!r}, and this version reads {SCHEMA!r}")
        Signature.from_json(facts["signature"])
        missing = {"path", "policy", "layer", "files"} - set(facts) or {INPUTS, CONFIG_FILE} - set(facts["files"])
        if missing:
            raise ValueError(f"it names no {', '.join(sorted(missing))}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not a bundle's manifest: {error}; shrink the case again") from error
    return facts


def _check_file(folder: Path, name: str, wanted: Any) -> None:
    file = folder / name
    if Path(name).name != name or not isinstance(wanted, dict):
        raise ValueError(f"{folder / MANIFEST} lists {name!r}, which is no file of a bundle; shrink the case again")
    if not file.is_file():
        raise ValueError(f"{folder} is not whole: {name} is missing; copy the bundle again")
    found = checksum(file)
    if found != wanted:
        cut = found["bytes"] != wanted.get("bytes")
        how = f"has {found['bytes']} bytes of {wanted.get('bytes')}" if cut else "has other contents than when written"
        raise ValueError(f"{file} {how}; copy the bundle again")


def checksum(file: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file, as the manifest keeps them."""
    raw = file.read_bytes()
    return {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}


def _small_case(origin: Origin, inputs: LayerInputs) -> Case:
    """A case that says what the shrunk inputs are; they are kept as tensors, since no recipe generates them."""
    return replace(
        origin.case,
        id=f"{origin.case.id}.shrunk",
        lengths=inputs.lengths,
        rows=len(inputs.row_position),
        layers=(inputs.layer,),
        pooled_prefix=0,
        overrides={},
        profiles=(),
        says=f"shrunk from {origin.case.id}; not generated from a recipe",
    )


def _expected(seen: Examined, path: TestedPath) -> dict[str, torch.Tensor]:
    """What the failing stage should hold: limits on the path's own upstream, or the oracle's result of the chain."""
    signature = seen.signature
    assert signature is not None
    if signature.comparison == "isolated":
        record = next(r for r in seen.records if r.comparison == "isolated" and r.stage == signature.stage)
        found = limits_of(record, seen.inputs, _on_cpu(seen.trace), path.declares)
        return {name: tensor.contiguous() for name, tensor in found.items()}
    exact = get_path("oracle").run(seen.inputs, "exact", upto=signature.stage)
    found = {f"{name}.exact": tensor.double() for name, tensor in exact[signature.stage].items()}
    if "entry" in seen.where and signature.stage == "topk":
        row, entry = seen.where["row"], seen.where["entry"]
        wanted = int((exact.value("topk")[row] == entry).any())
        found["swap"] = torch.tensor([row, entry, wanted])
    return found


def _on_cpu(trace: Trace) -> Trace:
    """The trace beside the inputs, which were never moved."""
    moved = {stage: {name: tensor.cpu() for name, tensor in parts.items()} for stage, parts in trace.stages.items()}
    return Trace(trace.case, trace.layer, trace.path, moved)


def _manifest(folder: Path, shrunk: Shrunk, path: TestedPath, origin: Origin) -> dict[str, Any]:
    seen, first = shrunk.smallest, shrunk.original
    worst = seen.verdict.to_json()["worst"]
    return {
        "schema": SCHEMA,
        "path": origin.spec or path.name,
        "policy": origin.policy if origin.policy in SHIPPED else POLICY,
        "device": origin.device,
        "layer": origin.layer,
        "recipe": json.loads(origin.case.to_json()),
        "signature": shrunk.signature.to_json(),
        "verdict": seen.verdict.text,
        "first_verdict": first.verdict.text,
        "worst": worst and {"at": place(worst["where"]), **worst},
        "sizes": {name: [count, sizes(seen.inputs).get(name, 0)] for name, count in sizes(first.inputs).items()},
        "values": complexity(seen.inputs),
        "passing": shrunk.neighbour and {"change": shrunk.neighbour.change, "values": shrunk.neighbour.distance},
        "tries": shrunk.tries,
        "finished": shrunk.finished,
        "environment": environment(),
        "files": {file.name: checksum(file) for file in sorted(folder.iterdir()) if file.name != MANIFEST},
    }
