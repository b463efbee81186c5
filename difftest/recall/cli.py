"""`difftest recall`: recall experiments. Each command parses, calls one function and chooses the exit code."""

import asyncio
import json
import os
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from .sweep_cli import show_main, sweep_main

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help="Is a planted fact still found?")
app.command("sweep")(sweep_main)
app.command("show")(show_main)
console = Console()
errors = Console(stderr=True)

USAGE, CANNOT_JUDGE, INTERRUPTED = 2, 125, 130


@app.callback()
def recall() -> None:
    """Is a planted fact still found as the context grows?"""


class CountBy(StrEnum):
    auto = "auto"
    endpoint = "endpoint"
    usage = "usage"
    tokenizer = "tokenizer"


def stop(code: int, message: str) -> NoReturn:
    """Prints one sentence on stderr and exits."""
    errors.print(f"difftest: {message}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(code)


def parse_extra(text: str) -> dict[str, Any]:
    """The JSON object of --extra-body; ValueError says what is wrong with it."""
    try:
        body = json.loads(text)
    except ValueError as error:
        raise ValueError(f'--extra-body is not JSON ({error}); give an object such as {{"seed": 1}}') from error
    if not isinstance(body, dict):
        raise ValueError(f"--extra-body is a JSON {type(body).__name__}, not an object")
    return body


@app.command("launch")
def launch_main() -> None:
    """Print the script that starts a server to compare: fp8 as SGLang ships it, or bf16 index keys.

    Use: difftest recall launch > launch.sh; its first lines say how it is set up.
    """
    typer.echo((Path(__file__).parent / "launch.sh").read_text(), nl=False)


@app.command("serve")
def serve_main(
    base_url: Annotated[str, typer.Option(help="Server to test: http://HOST:PORT, with or without /v1.")],
    model: Annotated[str, typer.Option(help="Served model; needed only when the server has several.")] = "",
    against: Annotated[
        str, typer.Option(help="A second server that is asked the same and shown beside the first.")
    ] = "",
    against_model: Annotated[str, typer.Option(help="Served model of the second server.")] = "",
    suite: Annotated[
        list[str] | None, typer.Option(help="needle, tools, secret or config (repeatable); all if none.")
    ] = None,
    length: Annotated[
        list[int] | None, typer.Option(help="Prompt tokens (repeatable), instead of each suite's own.")
    ] = None,
    max_length: Annotated[
        int, typer.Option(min=1, help="Longest prompt; beyond 22,597 the needle goes on by doubling.")
    ] = 22597,
    nine_depths: Annotated[bool, typer.Option("--nine-depths", help="Nine needle depths instead of three.")] = False,
    seed: Annotated[int, typer.Option(help="Decides every text and fact.")] = 0,
    count: Annotated[CountBy, typer.Option(help="How prompt tokens are counted.")] = CountBy.auto,
    tokenizer: Annotated[str, typer.Option(help="tokenizer.json, its folder, or a model's name.")] = "",
    index_topk: Annotated[
        int, typer.Option(min=1, help="The model's index_topk: 4 times as many tokens are controls.")
    ] = 512,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer; thinking models need more.")] = 256,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight on each server.")] = 8,
    retries: Annotated[int, typer.Option(min=0, help="Attempts after the first, for failures that may pass.")] = 5,
    backoff: Annotated[float, typer.Option(min=0.0, help="Seconds: bound of the first random wait; it doubles.")] = 0.5,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for a whole request.")] = 600.0,
    stall_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds between two parts of a stream.")] = 120.0,
    stream: Annotated[bool, typer.Option(help="Stream the answers.")] = True,
    api_key_env: Annotated[str, typer.Option(help="Environment variable that holds the API key.")] = "OPENAI_API_KEY",
    extra_body: Annotated[str, typer.Option(help="JSON object merged into every request body.")] = "{}",
    picks: Annotated[
        list[int] | None, typer.Option(help="Compare the indexer's picks at this prompt length (repeatable).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of exchanges.jsonl; an existing one is resumed.")] = None,
) -> None:
    """Play needles, tool calls, secrets and config files against a live chat server.

    Exit codes: 0 everything was remembered; 1 something was missed that shorter prompts show the model can do, or the
    picks break a rule; 125 cannot judge (no server, no answers, or the shortest prompts fail too); 2 usage;
    130 interrupted (the same command resumes).
    """
    from .client import ServerOptions, split_base_url
    from .outcome import worst_code
    from .picks_run import compare_picks
    from .plan import check_suites
    from .serve import CannotReach, RunOptions, run

    try:
        shared: dict[str, Any] = {
            "api_key": os.environ.get(api_key_env, ""),
            "timeout": timeout,
            "stall_timeout": stall_timeout,
            "retries": retries,
            "backoff": backoff,
            "stream": stream,
            "max_tokens": max_tokens,
            "concurrency": concurrency,
            "extra": parse_extra(extra_body),
        }
        servers = [ServerOptions(base_url, model, **shared)]
        if against:
            servers.append(ServerOptions(against, against_model, **shared))
        for server in servers:
            split_base_url(server.base_url)
        if any(tokens < 1 for tokens in [*(length or []), *(picks or [])]):
            raise ValueError("--length and --picks are token counts of at least 1")
        folder = out or Path("runs") / time.strftime("recall-%Y%m%d-%H%M%S")
        options = RunOptions(
            tuple(servers), folder, check_suites(suite or []), tuple(length or ()), max_length, seed, nine_depths,
            count.value, tokenizer, index_topk,
        )  # fmt: skip
        outcome = asyncio.run(run(options, console, errors))
        code = outcome.code
        if picks:
            code = worst_code(code, asyncio.run(compare_picks(options, tuple(picks), console)))
    except ValueError as error:
        stop(USAGE, str(error))
    except CannotReach as error:
        stop(CANNOT_JUDGE, f"cannot judge: {error}")
    except OSError as error:
        stop(USAGE, f"the results cannot be written: {error}; give another --out")
    except KeyboardInterrupt:
        stop(INTERRUPTED, "interrupted; the same command with the same --out resumes")
    console.print(f"exchanges: {folder / 'exchanges.jsonl'}", highlight=False)
    raise typer.Exit(code)
