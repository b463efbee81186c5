"""Records what units cost on this CPU into cases/costs.json: processor seconds, one thread, all default paths.

    make costs        # or: OMP_NUM_THREADS=1 python tests/record_costs.py [PROFILE]

Processor time, so that whatever else the machine does is not counted. `difftest.scale.needs` reads the file.
"""

import json
import platform
import sys
import time

import torch
from difftest.cases import registry

from difftest.runner import DEFAULT_PATHS, covers, open_paths, run_layer
from difftest.scale.needs import COSTS, Unit, recorded_seconds


def main() -> None:
    torch.set_num_threads(1)
    profile = sys.argv[1] if len(sys.argv) > 1 else "default"
    paths, _ = open_paths(DEFAULT_PATHS, "cpu")
    seconds = recorded_seconds()
    for case in registry.profile(profile):
        for layer in case.layers:
            todo = [path for path in paths if covers(path, case, layer)]
            started = time.process_time()
            for _ in run_layer(case, layer, todo):
                pass
            name = Unit(case.id, layer).name
            seconds[name] = round(time.process_time() - started, 2)
            print(f"{name} {seconds[name]}", flush=True)
            facts = {"schema": 1, "machine": platform.machine(), "paths": list(DEFAULT_PATHS), "seconds": seconds}
            COSTS.write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
