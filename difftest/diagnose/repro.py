"""The script of a bundle: one page, torch and the path's own module alone, that prints the verdict of one stage."""

import textwrap
from collections.abc import Mapping
from typing import NamedTuple

from ..paths.base import Path, get_path
from .signature import Signature

PAGE = 66
"""Lines of a printed page: 11 inches at 6 lines an inch."""


class Maker(NamedTuple):
    """How a script gets the path: an import line and the expression that makes it."""

    line: str
    expression: str


def maker(path: Path, spec: str) -> Maker | None:
    """The path by its own module where that makes an equal one, else by its registered spec; None if by neither."""
    kind = type(path)
    name, _, tail = spec.partition(":")
    try:
        registered = get_path(spec) if name else None
    except ValueError:
        registered = None
    if type(registered) is not kind and (registered is not None or not _importable(kind)):
        return Maker("from difftest.paths.base import get_path", f"get_path({spec!r})") if registered else None
    options = ", ".join(f"{key}={value!r}" for key, value in (part.split("=", 1) for part in tail.split(",") if part))
    return Maker(f"from {kind.__module__} import {kind.__qualname__}", f"{kind.__qualname__}({options})")


def _importable(kind: type) -> bool:
    return "<" not in kind.__qualname__ and kind.__module__ != "__main__"


def script(made: Maker, signature: Signature, title: str, sentence: str, device: str, by_element: bool) -> str:
    """The text of the script; at most PAGE lines. by_element: some single element is outside its limits."""
    rule = signature.rule if signature.rule in CHECKS else "topk" if signature.stage == "topk" else "excess"
    if rule == "grid" and by_element:
        rule = "excess"
    chained = "" if signature.comparison == "accumulated" else "name: stages[name] for name in stages if name != STAGE"
    return TEMPLATE.format(
        title=title,
        sentence=textwrap.fill(sentence.replace("\\", "/").replace('"', "'"), 116, max_lines=2),
        line=made.line,
        path=made.expression,
        stage=signature.stage,
        given=f"{{{chained}}}",
        where=f'.to("{device}")' if device != "cpu" else "",
        check=textwrap.indent(textwrap.dedent(CHECKS[rule]).strip(), "    "),
    )


TEMPLATE = '''\
"""{title}
{sentence}
Runs that stage on the inputs beside this file and says whether it holds: exit code 0 agrees, 1 disagrees.
"""
import json
import sys
from pathlib import Path

import torch
{line}

STAGE = "{stage}"
TYPE = dict(F64=torch.float64, F32=torch.float32, BF16=torch.bfloat16, I64=torch.int64, I32=torch.int32, U8=torch.uint8)

def load(name):
    raw = Path(__file__).with_name(name).read_bytes()  # safetensors: header size, JSON header, tensors
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    facts, tensors = header.pop("__metadata__", {{}}), {{}}
    for key, item in header.items():
        first, last = item["data_offsets"]
        flat = torch.frombuffer(bytearray(raw[start + first : start + last] or 8), dtype=TYPE[item["dtype"]])
        tensors[key] = flat[: torch.Size(item["shape"]).numel()].reshape(item["shape"])
    return facts, tensors

def layer(facts, tensors):
    types, kind = (sys.modules[f"difftest.reference.{{name}}"] for name in ("inputs", "config"))  # the path loaded them
    raw = json.loads(facts["config"])
    config = kind.ModelConfig(**raw | {{"compress_ratios": tuple(raw["compress_ratios"])}})
    known = {{name: json.loads(facts[name]) for name in ("layer", "num_pages", "page_size")}}
    known |= {{name: tuple(json.loads(facts[name])) for name in ("lengths", "prefix_entries")}}
    known["steps"] = tuple(tuple(types.Span(**span) for span in step) for step in json.loads(facts["steps"]))
    for name in ("index", "main"):
        parts = [tensors.get(f"{{name}}.{{part}}") for part in types.CompressorInputs.__dataclass_fields__]
        known[name] = None if parts[0] is None else types.CompressorInputs(*parts)
    known |= {{name: tensors.get(name) for name in types.LayerInputs.__dataclass_fields__ if name not in known}}
    return types.LayerInputs(**known | {{"config": config, "kind": config.kind(known["layer"])}})

def faults(inputs, stages, got, limit):
{check}

inputs, stages = layer(*load("inputs.safetensors")){where}, {{}}
for key, tensor in load("got.safetensors")[1].items():
    stages.setdefault(key.split(".")[0], {{}})[key.split(".", 1)[1]] = tensor{where}
given = {given}
try:
    trace = {path}.run(inputs, "repro", given=given, upto=STAGE)
    got = {{name: tensor.cpu() for name, tensor in trace[STAGE].items()}}
    found = list(faults(inputs, trace, got, load("expected.safetensors")[1]))
except Exception as error:
    found = [f"{{type(error).__name__}}: {{error}}"]
print(f"{{STAGE}}: " + (f"disagrees, {{found[0]}}" if found else "agrees"))
sys.exit(bool(found))
'''

CHECKS: Mapping[str, str] = {
    "excess": """
        for name in [key[:-4] for key in limit if key.endswith(".low") and key[:-4] in got]:
            x, low, high = got[name].double(), limit[name + ".low"], limit[name + ".high"]
            if name + ".unit" in limit and "scale" in got:  # codes in units of the exact scale
                blocks = x.shape[-1] // got["scale"].shape[-1]
                x = x / got["scale"].double().repeat_interleave(blocks, -1) * limit[name + ".unit"]
            for at in map(tuple, ((x < low) | (x > high) | x.isnan()).nonzero()[:1].tolist()):
                yield f"{name}{at}: got {x[at]}, exact {limit[name + '.exact'][at]}, allowed {low[at]} to {high[at]}"
    """,
    "rms": """
        shown = limit["value.exact"].isfinite()
        error = (got["value"].double() - limit["value.exact"])[shown].norm()
        if not error <= limit["limit.rms"]:
            yield f"the norm of all errors is {error:.4g}; allowed {float(limit['limit.rms']):.4g}"
    """,
    "row_rms": """
        error = (got["value"].double() - limit["value.exact"]).flatten(1).norm(dim=1)
        for row in (~(error <= limit["limit.row_rms"])).nonzero().flatten().tolist():
            yield f"row {row}: error norm {error[row]:.4g}, allowed {limit['limit.row_rms'][row]:.4g}"
    """,
    "gain": """
        exact = limit["value.exact"]
        along = ((got["value"].double() - exact) * exact).sum((0, 2)).abs()
        for head in (~(along <= limit["limit.gain"])).nonzero().flatten().tolist():
            yield f"head {head}: error along its output {along[head]:.4g}, allowed {limit['limit.gain'][head]:.4g}"
    """,
    "gain_all": """
        exact = limit["value.exact"]
        along = ((got["value"].double() - exact) * exact).sum().abs()
        if not along <= limit["limit.gain_all"]:
            yield f"error along the output is {along:.4g}; allowed {float(limit['limit.gain_all']):.4g}"
    """,
    "granularity": """
        for name, x in got.items():
            exact = limit.get(name + ".exact")
            if exact is not None:
                low, own = (value.float().view(torch.int32) & 0xFFF for value in (exact, x))
                fine = (low != 0) & (x != 0) & x.isfinite()
                if int(fine.sum()) >= 16 and (own[fine] == 0).double().mean() >= 0.95:
                    yield f"{int(fine.sum())} values of {name} end in 12 zero bits: an undeclared rounding"
    """,
    "topk": """
        for row, visible in enumerate(inputs.visible.tolist()):
            score = stages["score"]["value"][row, :visible].double().nan_to_num(nan=-torch.inf).tolist()
            chosen, wanted = got["value"][row].tolist(), min(visible, got["value"].shape[1])
            picked = [entry for entry in chosen if 0 <= entry < visible]
            left = max((score[entry] for entry in range(visible) if entry not in picked), default=-torch.inf)
            if len({*picked}) != wanted or chosen != picked + [-1] * (len(chosen) - wanted):
                yield f"row {row}: {chosen} is not {wanted} different entries below {visible}, padding behind them"
            elif left > min((score[entry] for entry in picked), default=torch.inf):
                yield f"row {row} selects {picked} and leaves out a score of {left}; its scores are {score}"
    """,
    "grid": """
        for name in [key[:-5] for key in limit if key.endswith(".unit")]:
            code = got[name].double() / limit[name + ".unit"]  # NaN for dims that hold no codes
            off = (code - code.float().to(torch.float8_e4m3fn).double()).abs() > 2**-20 * code.abs()
            for at in map(tuple, off.nonzero()[:1].tolist()):
                yield f"{name}{at}: {got[name][at]} is no e4m3 code times the scale {limit[name + '.unit'][at]}"
    """,
    "uniform_scale": """
        shown = limit["value.exact"].isfinite()
        x, exact = got["value"].double()[shown], limit["value.exact"][shown]
        factor = (x * exact).sum() / exact.square().sum()
        if (factor - 1).abs() > 2**-8 and (factor - 1).abs() * exact.norm() > 2 * (x - factor * exact).norm():
            yield f"scores are {factor:.6g} times the exact ones"
    """,
    "unexplained_swap": """
        row, entry, picked = limit["swap"].tolist()
        if (entry in got["value"][row].tolist()) != bool(picked):
            yield f"row {row}: entry {entry} should {'be' if picked else 'not be'} selected, by the exact scores"
    """,
}
"""Bodies of `faults` by rule: the rest of the stages' rules, NaN and shapes included, are what `excess` looks at."""
