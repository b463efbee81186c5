"""The process of one switch trial: reads a request as JSON from stdin, prints the verdicts as one line of JSON."""

import importlib
import json
import sys
from dataclasses import replace
from typing import Any

from ..cases.case import Case
from ..paths.base import get_path
from ..policy import load_policy
from ..runner import run_layer
from ..verdict import judge
from .switches import number


def run(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Verdicts of a request (`switches.Trials`): callables first, then the case and the path as switched."""
    case, spec = Case.from_json(json.dumps(request["case"])), request["path"]
    options: list[str] = []
    for kind, name, value in request["switches"]:
        if kind == "callable":
            getattr(importlib.import_module(name), value)()
        elif kind == "case":
            case = replace(case, overrides={**case.overrides, name: number(value)})
        elif kind == "path":
            options.append(f"{name}={value}")
    path = get_path(spec + (("," if ":" in spec else ":") + ",".join(options) if options else ""))
    available = path.availability()
    if not available.ok:
        raise ValueError(f"path {path.name} cannot run here: {available.why}")
    policy = load_policy(request["policy"])
    records = [
        record
        for layer in request["layers"]
        for result in run_layer(case, layer, [path], request["device"])
        for record in result.records
    ]
    return [verdict.to_json() for verdict in judge(records, policy)]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(run(json.load(sys.stdin))) + "\n")
