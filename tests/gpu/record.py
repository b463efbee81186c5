"""Records the shipped cases into the folder given, and prints each file with its size."""

import sys
import traceback
from dataclasses import replace
from pathlib import Path

from difftest.cases.recorded_cases import RECORDED_CASES

from difftest.recording import record

out = Path(sys.argv[1])
failed = 0
for case in RECORDED_CASES:
    for layer in case.layers:
        try:
            record([replace(case, layers=(layer,))], out, on_file=lambda file: print(file.name, file.stat().st_size))
        except Exception:
            failed += 1
            traceback.print_exc()
print(sum(file.stat().st_size for file in out.glob("*.safetensors")), "bytes in all,", failed, "failed")
