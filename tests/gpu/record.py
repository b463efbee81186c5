"""Records the shipped cases into the folder given, and prints each file with its size."""

import sys
import traceback
from pathlib import Path

from difftest.cases.recorded_cases import RECORDED_CASES

from difftest.paths.base import get_path
from difftest.paths.recorded import recording_file
from difftest.recording import RECORDED_PATH, record_one

out = Path(sys.argv[1])
out.mkdir(parents=True, exist_ok=True)
path, failed = get_path(RECORDED_PATH), 0
for case in RECORDED_CASES:
    for layer in case.layers:
        file = recording_file(out, case.id, layer)
        try:
            record_one(path, case, layer).save(file)
            print(file.name, file.stat().st_size)
        except Exception:
            failed += 1
            traceback.print_exc()
print(sum(file.stat().st_size for file in out.glob("*.safetensors")), "bytes in all,", failed, "failed")
