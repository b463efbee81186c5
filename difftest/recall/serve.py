"""Plays the verification suite against one live server, or two side by side."""

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from .client import Attempt, ChatClient, GivenUp, Reply, ServerOptions
from .conversation import Answer, Conversation, SuiteName
from .failures import Failure
from .journal import Exchange, Journal, Status
from .length import CountBy, choose_counter
from .outcome import Outcome, collect, judge
from .plan import Cell, build, cells
from .summary import show

SERVER_NAMES = ("A", "B")
LOST_KINDS = ("unreachable", "http 401", "http 403")
"""Failures that the next request would meet too: the run stops asking that server."""


@dataclass(frozen=True)
class RunOptions:
    """What a run asks. `servers` holds one or two; the second is the one compared with. `out` receives the journal."""

    servers: tuple[ServerOptions, ...]
    out: Path
    suites: tuple[SuiteName, ...]
    lengths: tuple[int, ...] = ()
    longest: int = 22597
    seed: int = 0
    nine_depths: bool = False
    count_by: CountBy = "auto"
    tokenizer: str = ""
    index_topk: int = 512

    def settings(self) -> dict[str, Any]:
        """What decides the prompts and who is asked: a journal is resumed only with the same."""
        addresses = {
            f"server {name}": server.base_url for name, server in zip(SERVER_NAMES, self.servers, strict=False)
        }
        models = {f"model {name}": server.model for name, server in zip(SERVER_NAMES, self.servers, strict=False)}
        extra = {f"body {name}": server.extra for name, server in zip(SERVER_NAMES, self.servers, strict=False)}
        max_tokens = self.servers[0].max_tokens
        return {**addresses, **models, **extra, "seed": self.seed, "max tokens": max_tokens}


class CannotReach(Exception):
    """A server cannot be asked at all: exit 125."""


@dataclass
class Play:
    """A run in progress: the journal and the progress display."""

    journal: Journal
    progress: Progress
    bars: dict[str, TaskID] = field(default_factory=dict)

    async def conversation(self, name: str, client: ChatClient, talk: Conversation) -> None:
        """Plays the turns of one conversation in order: later turns meet the prefix cache that earlier ones filled."""
        for turn in range(len(talk.turns)):
            recorded = self.journal.exchanges.get((name, talk.id, turn))
            if recorded is None:
                try:
                    self.journal.add(await self._exchange(name, client, talk, turn))
                except GivenUp:
                    return
            self.progress.advance(self.bars[name])

    async def _exchange(self, name: str, client: ChatClient, talk: Conversation, turn: int) -> Exchange:
        body = client.body(talk.messages(turn), talk.tools)
        attempts: list[Attempt] = []
        status: Status = "answered"
        reply, failure, too_long = Reply(Answer(), {}, 0.0, None), "", False
        try:
            reply = await client.ask(body, attempts)
        except GivenUp:
            raise
        except Failure as error:
            status, failure, too_long = "failed" if error.retry else "refused", str(error), error.too_long
            if error.kind in LOST_KINDS:
                status = "failed"
                client.given_up = str(error)
        return Exchange(
            server=name,
            conversation=talk.id,
            turn=turn,
            suite=talk.suite,
            length=talk.length,
            depth=talk.depth,
            digest=talk.digest(),
            status=status,
            request=body,
            expect=talk.turns[turn].expect,
            answer=reply.answer,
            usage=reply.usage,
            prompt=int(reply.usage.get("prompt_tokens") or 0),
            seconds=reply.seconds,
            first_token=reply.first_token,
            attempts=tuple(attempts),
            failure=failure,
            too_long=too_long,
        )


async def resolve_model(name: str, options: ServerOptions) -> ServerOptions:
    """`options` with the model filled in from /v1/models. Also the first contact: CannotReach names what is wrong.

    ValueError when the server has several models, or not the one asked for.
    """
    first = replace(options, retries=min(options.retries, 1))
    try:
        async with ChatClient(first) as client:
            models = await client.models()
    except Failure as failure:
        if failure.status == 404 and options.model:
            return options
        raise CannotReach(
            f"server {name} at {options.base_url} gives no model list: {failure}; start it or correct the address"
        ) from failure
    if options.model and models and options.model not in models:
        raise ValueError(f"server {name} does not serve {options.model!r}; it serves {', '.join(models[:8])}")
    if not options.model and len(models) != 1:
        raise ValueError(f"server {name} serves {', '.join(models[:8]) or 'no model'}; choose one with --model")
    return replace(options, model=options.model or models[0])


def progress_bar(console: Console) -> Progress:
    """One bar a server; silent when the console is no terminal."""
    return Progress(
        TextColumn("server {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


async def fitted(options: RunOptions, client: ChatClient, journal: Journal, console: Console) -> list[Conversation]:
    """All conversations of the run at their lengths; what does not fit the server's context is left out."""
    chosen = cells(options.suites, options.lengths, options.longest, options.nine_depths)
    counter, by = await choose_counter(options.count_by, client, options.tokenizer)
    console.print(f"{len(chosen)} conversations; lengths counted by {by}", highlight=False)
    talks: list[Conversation] = []
    refused: list[Cell] = []
    for cell in chosen:
        try:
            talks.append(await build(cell, options.seed, counter, journal))
        except Failure as failure:
            if not failure.too_long:
                raise CannotReach(f"the length of {cell.fitted_as} cannot be counted: {failure}") from failure
            refused.append(cell)
    for fitted_as in dict.fromkeys(cell.fitted_as for cell in refused):
        console.print(f"{fitted_as} is left out: it does not fit the server's context", highlight=False)
    return talks


async def run(options: RunOptions, console: Console, errors: Console) -> Outcome:
    """Runs the suite and prints the summary. ValueError: bad usage. CannotReach: a server cannot be asked."""
    servers = tuple(
        [await resolve_model(name, server) for name, server in zip(SERVER_NAMES, options.servers, strict=False)]
    )
    options = replace(options, servers=servers)
    with Journal(options.out, options.settings()) as journal:
        clients = {name: ChatClient(server) for name, server in zip(SERVER_NAMES, servers, strict=False)}
        try:
            talks = await fitted(options, clients["A"], journal, errors)
            journal.check({talk.id: talk.digest() for talk in talks})
            with progress_bar(errors) as progress:
                play = Play(journal, progress)
                turns = sum(len(talk.turns) for talk in talks)
                play.bars = {name: progress.add_task(name, total=turns) for name in clients}
                async with asyncio.TaskGroup() as group:
                    for talk in talks:
                        for name, client in clients.items():
                            group.create_task(play.conversation(name, client, talk))
        finally:
            for client in clients.values():
                await client.__aexit__(None, None, None)
        exchanges = list(journal.exchanges.values())
    planned = {(talk.suite, talk.length, talk.depth): len(talk.turns) for talk in talks}
    outcome = judge(
        collect(exchanges, {(str(s), n, d): turns for (s, n, d), turns in planned.items()}), options.index_topk
    )
    show(outcome, exchanges, console)
    for name, client in clients.items():
        if client.given_up:
            text = f"server {name} stopped answering ({client.given_up}); the same command resumes"
            errors.print(text, markup=False, highlight=False, soft_wrap=True)
    return outcome
