"""Times SGLang's compressors and indexer of one layer with the plugin off and on: a decode graph, and prefills."""

import sys

import torch
from difftest.cases.case import Case
from difftest.cases.generate import generate
from difftest.kernels.sglang_plugin.switch import switched

from difftest.paths._layer_run import LayerRun
from difftest.paths._layer_taps import Seen
from difftest.paths.base import get_path
from difftest.paths.sglang_bf16k_layer import install_hooks

REPEATS = 30
DECODE = {
    "decode 1 x 16k": Case("d1", "gaussian", (16390,), mode="decode", pooled_prefix=4000, rows=2, layers=(2,)),
    "decode 8 x 16k": Case("d8", "gaussian", (16390,) * 8, mode="decode", pooled_prefix=4000, rows=8, layers=(2,)),
    "decode 1 x 64k": Case("d64", "gaussian", (65550,), mode="decode", pooled_prefix=16300, rows=2, layers=(2,)),
}
PREFILL = {
    "prefill 4k (paged)": Case("p4", "gaussian", (4096,), rows=4, layers=(2,)),
    "prefill 16k (gathered)": Case("p16", "gaussian", (16384,), rows=4, layers=(2,)),
}


def milliseconds(work: object) -> float:
    """Median time of `work()` on the device."""
    times = []
    for _ in range(REPEATS + 3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()  # type: ignore[operator]
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times[3:])[REPEATS // 2]


def measure(spec: str, case: Case) -> float:
    path, inputs = get_path(spec), generate(case, 2).to("cuda")
    with switched("bf16k" in spec), torch.no_grad():
        run = LayerRun.start(inputs, path.table(inputs), "v2", path._keys(inputs), graphs=True)
        run.run()
        if run.graph is not None:
            return milliseconds(run.graph.graph.replay)
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        with forward_context(ForwardContext(attn_backend=run.stood.backend)):
            batch, modules = run.prepare(inputs.steps[-1])
            return milliseconds(lambda: modules.run(run.stood.backend, batch, Seen()))


def main() -> None:
    install_hooks()
    for name, case in {**DECODE, **PREFILL}.items():
        off, on = (measure(spec, case) for spec in ("sglang-fp8-layer", "sglang-bf16k-layer"))
        print(f"{name:24} off {off:8.3f} ms   on {on:8.3f} ms   {on / off:.2f}x", flush=True)


if __name__ == "__main__":
    sys.exit(main())
