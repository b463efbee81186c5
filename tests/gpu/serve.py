"""Serves the tiny model by SGLang's engine with the flags of the environment, and keeps what it answered.

Usage: serve.py FOLDER NAME. Writes FOLDER/NAME.json (outputs, times, cache size) and FOLDER/NAME.npz (indexer picks).
"""

import base64
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

PROMPTS = {"short": 700, "selected": 2600, "gathered": 9000}
"""Tokens of a prompt: nothing to select, paged scores, keys gathered once (SGLang's default from 8,192 rows on)."""
NEW_TOKENS = 24
BATCH, BATCH_TOKENS, BATCH_NEW = 4, 8000, 200
REPEATS = 7
LONG = 30000


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, 2048, length).tolist()


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keeps the other server of this folder from timing at the same time."""
    with (folder / "timing.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Server:
    def __init__(self, folder: Path) -> None:
        import tiny_server_model
        from sglang.srt.entrypoints.engine import Engine

        tiny_server_model.write(folder / "model")
        self.engine = Engine(
            model_path=str(folder / "model"),
            skip_tokenizer_init=True,
            sampling_backend="pytorch",
            attention_backend="dsv4",
            moe_runner_backend="triton",
            grammar_backend="none",
            page_size=256,
            context_length=32768,
            chunked_prefill_size=16384,
            mem_fraction_static=float(os.environ.get("MEM_FRACTION", "0.3")),
            max_total_tokens=int(os.environ["MAX_TOKENS"]) if "MAX_TOKENS" in os.environ else None,
            max_running_requests=8,
            cuda_graph_bs_decode=[1, BATCH],
            cuda_graph_max_bs_decode=BATCH,
            cuda_graph_backend_prefill="disabled",
            enable_return_indexer_topk=True,
            random_seed=1,
            log_level="info",
        )

    def ask(self, ids: Any, new_tokens: int, picks: bool = False) -> tuple[Any, float]:
        """Answers (one dict, or a list) and the seconds they took."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = GenerateReqInput(
            input_ids=ids,
            sampling_params={"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True},
            return_indexer_topk=picks,
        )
        started = time.perf_counter()
        answer = self.engine.loop.run_until_complete(
            self.engine.tokenizer_manager.generate_request(request, None).__anext__()
        )
        return answer, time.perf_counter() - started


def main(folder: Path, name: str) -> None:
    server = Server(folder)
    found: dict[str, Any] = {"info": capacity(server.engine.get_server_info())}
    arrays: dict[str, Any] = {}
    for kind, length in PROMPTS.items():
        for attempt in ("first", "prefix hit"):
            answer, seconds = server.ask(prompt(length, length), NEW_TOKENS, picks=True)
            found[f"{kind}, {attempt}"] = {
                "output": answer["output_ids"],
                "cached": answer["meta_info"].get("cached_tokens"),
                "seconds": seconds,
            }
            picks = answer["meta_info"].get("indexer_topk")
            if picks is not None:
                arrays[f"{kind}, {attempt}"] = unpacked(picks)
    with alone(folder):
        server.ask(prompt(LONG, 0), 1)
        found["prefill seconds"] = median(server.ask(prompt(LONG, seed), 1)[1] for seed in range(1, 1 + REPEATS))
        many = [prompt(BATCH_TOKENS, 100 + seed) for seed in range(BATCH)]
        server.ask(many, 2 + BATCH_NEW)
        steps = [server.ask(many, 2 + BATCH_NEW)[1] - server.ask(many, 2)[1] for _ in range(REPEATS)]
        found["decode step seconds"] = median(steps) / BATCH_NEW
    np.savez_compressed(folder / f"{name}.npz", **arrays)
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1, default=str))
    print(json.dumps({key: value for key, value in found.items() if "," not in key}, default=str))
    server.engine.shutdown()


def unpacked(picks: Any) -> np.ndarray:
    """Picks int32 [tokens * layers * k], as text where a detokenizer packed them, else as they are."""
    if isinstance(picks, str):
        return np.frombuffer(base64.b64decode(picks), dtype=np.int32)
    return np.asarray(picks, dtype=np.int32).reshape(-1)


def capacity(info: dict[str, Any]) -> dict[str, Any]:
    return {key: info[key] for key in ("max_total_num_tokens", "max_total_tokens") if key in info}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
