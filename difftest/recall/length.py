"""Making a prompt as long as asked for: counting tokens, and choosing the amount of filler that fits."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from .assemble import malformed
from .client import ChatClient
from .conversation import Conversation, Message
from .failures import Failure

TOKENS_A_WORD = 1.35
"""First guess of tokens in one filler word, replaced by the measured slope after two counts."""
PROBE_WORDS = 200
"""Filler of the first count, far enough from 0 for a slope."""
MAX_COUNTS = 6
"""Counts spent on one length at most; the slope is nearly constant, so two or three are usual."""
SLACK = 0.004
"""Share of a length by which a prompt may fall short of it (at least `SLACK_TOKENS`); a prompt is never longer."""
SLACK_TOKENS = 8
COUNT_TOKENS = 1
"""Tokens generated when a length is counted from the usage figures of a chat request."""

CountBy = Literal["auto", "endpoint", "usage", "tokenizer"]


class Counter(Protocol):
    """Counts the prompt tokens of a chat as the server sees it."""

    async def count(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> int: ...


class EndpointCounter:
    """Asks the server's `/tokenize` (SGLang, vLLM), which applies the chat template and generates nothing."""

    def __init__(self, client: ChatClient) -> None:
        self._client = client

    async def count(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> int:
        return len(await self.tokens(messages, tools))

    async def tokens(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Token ids of the rendered chat."""
        body: dict[str, Any] = {"model": self._client.options.model, "messages": list(messages)}
        if tools:
            body["tools"] = list(tools)
        template = self._client.options.extra.get("chat_template_kwargs")
        if template:
            body["chat_template_kwargs"] = template
        got = (await self._client.json("POST", self._client.root + "/tokenize", body)).get("tokens")
        if not isinstance(got, list) or not all(isinstance(token, int) for token in got):
            raise malformed("/tokenize returned no list of token ids")
        return got


class UsageCounter:
    """Sends the chat with a one-token answer and reads `usage.prompt_tokens`."""

    def __init__(self, client: ChatClient) -> None:
        self._client = client

    async def count(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> int:
        body = {**self._client.body(messages, tools), "max_tokens": COUNT_TOKENS, "stream": False}
        body.pop("stream_options", None)
        usage = (await self._client.ask(body, [])).usage
        if not isinstance(usage.get("prompt_tokens"), int):
            raise Failure("no usage", "the server reports no usage.prompt_tokens; give --tokenizer", retry=False)
        return int(usage["prompt_tokens"])


class TokenizerCounter:
    """Counts with a local tokenizer. `overhead` stands for the chat template: the tokens added to the bare texts."""

    def __init__(self, name_or_path: str) -> None:
        self._encode = load_tokenizer(name_or_path)
        self.overhead = 0

    async def count(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> int:
        texts = [str(message.get("content") or "") for message in messages]
        return self.overhead + sum(len(self._encode(text)) for text in texts)

    async def calibrate(self, server: Counter) -> None:
        """Sets `overhead` from one short prompt that the server counts too."""
        probe: list[Message] = [{"role": "user", "content": "Answer with OK."}]
        self.overhead = await server.count(probe, ()) - (await self.count(probe, ()) - self.overhead)


def load_tokenizer(name_or_path: str) -> Callable[[str], list[int]]:
    """The encode function of a `tokenizer.json`, of the folder that holds one, or of a tokenizer on a hub.

    ValueError when the `tokenizers` library is missing or the tokenizer cannot be loaded.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ValueError("--tokenizer needs the tokenizers library: pip install tokenizers") from error
    path = Path(name_or_path)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        loaded = Tokenizer.from_file(str(file)) if file.is_file() else Tokenizer.from_pretrained(name_or_path)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(
            f"{name_or_path!r} is no tokenizer: {error}; give a tokenizer.json or a model's name"
        ) from error
    return lambda text: list(loaded.encode(text, add_special_tokens=False).ids)


async def choose_counter(by: CountBy, client: ChatClient, tokenizer: str) -> tuple[Counter, str]:
    """(counter, its name). `auto`: the tokenizer if given, else the server's `/tokenize`, else its usage figures."""
    endpoint, usage = EndpointCounter(client), UsageCounter(client)
    if by in ("auto", "endpoint") and not (tokenizer and by == "auto"):
        try:
            await endpoint.count([{"role": "user", "content": "OK"}], ())
            return endpoint, "endpoint"
        except Failure as failure:
            if by == "endpoint":
                raise ValueError(f"--count endpoint, but /tokenize failed: {failure}; use --count usage") from failure
    if tokenizer:
        local = TokenizerCounter(tokenizer)
        await local.calibrate(usage)
        return local, "tokenizer"
    if by == "tokenizer":
        raise ValueError("--count tokenizer needs --tokenizer: give a tokenizer.json or a model's name")
    return usage, "usage"


async def fit(build: Callable[[int], Conversation], target: int, counter: Counter) -> tuple[int, int]:
    """(words, tokens): the filler with which `build(words)`'s last prompt has just under `target` tokens.

    Secant steps on the count, which grows almost linearly with the words. ValueError when even an empty filler is too
    long. After `MAX_COUNTS` counts the best prompt that is not too long is taken.
    """

    async def count(words: int) -> int:
        conversation = build(words)
        return await counter.count(conversation.messages(len(conversation.turns) - 1), conversation.tools)

    known = {0: await count(0)}
    if known[0] > target:
        raise ValueError(
            f"{build(0).id} needs {known[0]} tokens even without filler; choose a longer length than {target}"
        )
    slack = max(SLACK_TOKENS, int(SLACK * target))
    words = min(PROBE_WORDS, int((target - known[0]) / TOKENS_A_WORD))
    for _ in range(MAX_COUNTS):
        if words in known:
            break
        known[words] = await count(words)
        if target - slack <= known[words] <= target:
            break
        words = _next_words(known, target - slack // 2)
    fitting = {words: tokens for words, tokens in known.items() if tokens <= target}
    best = max(fitting, key=lambda words: fitting[words])
    return best, fitting[best]


def _next_words(known: dict[int, int], aim: int) -> int:
    """Words for `aim` tokens, by the line through the two nearest known counts."""
    near = sorted(known, key=lambda words: abs(known[words] - aim))[:2]
    (low, high) = sorted(near)
    slope = (known[high] - known[low]) / (high - low) if high > low else TOKENS_A_WORD
    return max(0, round(near[0] + (aim - known[near[0]]) / (slope if slope > 0 else TOKENS_A_WORD)))
