"""Asks live SGLang servers for the indexer's picks of one needle prompt, and compares them layer by layer."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .client import ChatClient
from .conversation import Conversation, Message
from .failures import Failure
from .length import EndpointCounter, fit
from .outcome import AGREES, CANNOT_JUDGE, DISAGREES, TOKENS_AN_ENTRY, worst_code
from .picks import LayerDifference, Picks, check_rules, compare_layers, decode_picks, needle_layers
from .serve import SERVER_NAMES, CannotReach, RunOptions, resolve_model
from .suites.needle import needle

DEPTH = "middle"
QUESTION_ROWS = 8
"""Last prompt tokens whose picks are searched for the needle: the end of the question and the chat template's tail."""
SHOWN_ENTRIES = 6


@dataclass(frozen=True)
class PickedPrompt:
    """A prompt as token ids, with the entries that hold the needle's code."""

    tokens: list[int]
    needle: range


async def prompt_of_length(client: ChatClient, length: int, seed: int) -> PickedPrompt:
    """The needle prompt of `length` tokens. The code's place is where the ids change when its digits do."""
    counter = EndpointCounter(client)
    words, _ = await fit(lambda count: needle(seed, length, DEPTH, count), length, counter)
    talk = needle(seed, length, DEPTH, words)
    code = talk.turns[0].expect.contains[0]
    other = code.translate(str.maketrans("0123456789", "5678901234"))
    tokens = await counter.tokens(talk.messages(0))
    changed = await counter.tokens(_replaced(talk, code, other))
    before = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, changed, strict=False)))
    after = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens[::-1], changed[::-1], strict=False)))
    end = max(before + 1, len(tokens) - after)
    return PickedPrompt(tokens, range(before // TOKENS_AN_ENTRY, (end - 1) // TOKENS_AN_ENTRY + 1))


def _replaced(talk: Conversation, code: str, other: str) -> list[Message]:
    return [{**message, "content": message["content"].replace(code, other)} for message in talk.messages(0)]


async def picks_of(client: ChatClient, tokens: list[int], topk: int) -> Picks:
    """Picks of every prompt token. CannotReach when the server gives none; ValueError when they cannot be decoded."""
    body = {
        "input_ids": tokens,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_indexer_topk": True,
        "stream": False,
    }
    try:
        got = await client.json("POST", client.root + "/generate", body)
    except Failure as failure:
        raise CannotReach(f"{client.root}/generate gives no picks: {failure}; only SGLang has it") from failure
    meta = got.get("meta_info") or {}
    text = meta.get("indexer_topk")
    if not isinstance(text, str):
        raise CannotReach(f"{client.root} returns no picks; start SGLang with --enable-return-indexer-topk")
    rows = int(meta.get("prompt_tokens", len(tokens))) + int(meta.get("completion_tokens", 1)) - 1
    return decode_picks(text, rows, topk)[: len(tokens)]


async def compare_picks(options: RunOptions, lengths: tuple[int, ...], console: Console) -> int:
    """Checks the picks at every length, and compares two servers if there are two. Returns the exit code.

    A broken rule is 1. A different selection is no fault by itself (formats differ): its size is printed by layer, and
    written token by token to `picks-LENGTH.jsonl` in the run's folder, one line a layer. Needs
    43,008 B a token and server for V4-Flash (21 layers x 512 picks x 4 B), 0.97 GB at 22,597 tokens.
    """
    codes = [AGREES]
    for length in lengths:
        got: dict[str, Picks] = {}
        prompt: PickedPrompt | None = None
        for name, server in zip(SERVER_NAMES, options.servers, strict=False):
            async with ChatClient(await resolve_model(name, server)) as client:
                try:
                    prompt = prompt or await prompt_of_length(client, length, options.seed)
                except Failure as failure:
                    raise CannotReach(f"/tokenize of server {name} failed: {failure}") from failure
                got[name] = await picks_of(client, prompt.tokens, options.index_topk)
        if prompt:
            codes.append(_report(length, prompt, got, options.out / f"picks-{length}.jsonl", console))
    return worst_code(*codes)


def _report(length: int, prompt: PickedPrompt, got: dict[str, Picks], file: Path, console: Console) -> int:
    code = AGREES
    console.print(f"picks at {len(prompt.tokens):,} tokens (asked for {length:,}), needle in entries {prompt.needle}")
    for name, picks in got.items():
        for finding in check_rules(picks):
            code = DISAGREES
            console.print(f"server {name}, layer slot {finding.layer}: rule {finding.rule} broken: {finding.message}")
        found = needle_layers(picks, prompt.needle, QUESTION_ROWS)
        console.print(f"server {name}: the question picks the needle in {sum(found)} of {len(found)} layers")
    if len(got) < 2:
        return code
    try:
        layers = list(compare_layers(*got.values()))
    except ValueError as error:
        console.print(f"cannot judge the difference: {error}", highlight=False)
        return worst_code(code, CANNOT_JUDGE)
    console.print(_table(layers))
    file.write_text("".join(json.dumps(asdict(layer)) + "\n" for layer in layers))
    console.print(f"token by token: {file}", markup=False, highlight=False, soft_wrap=True)
    return code


def _table(layers: Sequence[LayerDifference]) -> Table:
    table = Table(title="overlap of picks, A and B", title_justify="left", box=None, pad_edge=False)
    for title in ("slot", "rows", "mean", "p1", "worst", "token", "only A", "only B"):
        table.add_column(title, justify="left" if title.startswith("only") else "right")
    for layer in layers:
        numbers = (f"{value:.4f}" for value in (layer.mean, layer.percentile_1, layer.worst))
        only = (" ".join(map(str, entries[:SHOWN_ENTRIES])) for entries in (layer.only_a, layer.only_b))
        table.add_row(str(layer.layer), str(layer.rows), *numbers, str(layer.worst_row), *only)
    return table
