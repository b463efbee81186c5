"""From exchanges to a verdict: which conversations were remembered, which were not, and what that says."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from .conversation import grade
from .journal import Exchange

AGREES, DISAGREES, CANNOT_JUDGE = 0, 1, 125
NOT_EXERCISED = -1
"""A suite whose prompts are all so short that every entry is selected: neither pass nor fault, and no exit code."""
TOKENS_AN_ENTRY = 4
"""Tokens of one compressed key (csa): up to index_topk * 4 tokens every key is selected and selection cannot fail."""
Result = Literal["pass", "miss", "too long", "refused", "failed", "missing"]
"""`too long`: the prompt does not fit the server's context, which is no fault and is left out of the verdict."""
Row = tuple[str, int, str]
"""(suite, length, depth) of a conversation."""


@dataclass(frozen=True)
class CellResult:
    """A conversation on one server. `why` is the first turn's reason that is no pass; `prompt` its longest prompt."""

    result: Result
    why: str = ""
    prompt: int = 0
    seconds: float = 0.0
    answers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What a run says. `code` is the exit code; `conclusion` the sentences to print last."""

    code: int
    conclusion: tuple[str, ...]
    cells: dict[str, dict[Row, CellResult]]


def cell_result(turns: Sequence[Exchange], expected_turns: int) -> CellResult:
    """The result of one conversation from its exchanges, in turn order."""
    if not turns:
        return CellResult("missing", "not asked")
    prompt = max(turn.prompt for turn in turns)
    seconds = sum(turn.seconds for turn in turns)
    answers = tuple(turn.answer.content or str(turn.answer.tool_calls or "") for turn in turns)
    for turn in turns:
        if turn.status == "answered":
            graded = grade(turn.expect, turn.answer)
            if not graded.passed:
                where = f"turn {turn.turn + 1}: " if expected_turns > 1 else ""
                return CellResult("miss", where + graded.why, prompt, seconds, answers)
        elif turn.status == "refused":
            return CellResult("too long" if turn.too_long else "refused", turn.failure, prompt, seconds, answers)
        else:
            return CellResult("failed", turn.failure, prompt, seconds, answers)
    if len(turns) < expected_turns:
        return CellResult("missing", f"{len(turns)} of {expected_turns} turns were asked", prompt, seconds, answers)
    return CellResult("pass", "", prompt, seconds, answers)


def collect(exchanges: Sequence[Exchange], plan: dict[Row, int]) -> dict[str, dict[Row, CellResult]]:
    """Results by server and cell. `plan` gives the turns of every conversation that should have been played."""
    by_cell: dict[tuple[str, Row], list[Exchange]] = {}
    for exchange in exchanges:
        by_cell.setdefault((exchange.server, (exchange.suite, exchange.length, exchange.depth)), []).append(exchange)
    servers = sorted({exchange.server for exchange in exchanges}) or ["A"]
    return {
        server: {
            row: cell_result(sorted(by_cell.get((server, row), []), key=lambda turn: turn.turn), turns)
            for row, turns in plan.items()
        }
        for server in servers
    }


def judge(cells: dict[str, dict[Row, CellResult]], index_topk: int) -> Outcome:
    """The verdict of a run.

    A miss beyond `4 * index_topk` tokens counts (exit 1) when the same suite passes below that length, where every
    entry is selected whatever the scores are: the controls. A suite that misses half of its controls or more cannot be
    judged (125): the model, its chat template or its tool parser fails, not its memory. Unanswered requests are 125
    unless something was missed; so is a run whose suites all stay below that length. With two servers the misses of
    either count, and the conclusion says how many differ.
    """
    limit = index_topk * TOKENS_AN_ENTRY
    codes, lines = [], []
    for server, results in cells.items():
        for suite in suites_of(results):
            own = {row: result for row, result in results.items() if row[0] == suite}
            suite_code, line = _judge_suite(own, limit)
            lines.append(f"server {server}, {suite}: {line}")
            codes.append(suite_code)
    if len(cells) == 2:
        lines.append(compare(*cells.values()))
    judged = [code for code in codes if code != NOT_EXERCISED]
    return Outcome(worst_code(*judged) if judged else CANNOT_JUDGE, tuple(lines), cells)


def worst_code(*codes: int) -> int:
    """The exit code of several verdicts: one disagreement outweighs what could not be judged."""
    return DISAGREES if DISAGREES in codes else max(codes)


def _judge_suite(results: dict[Row, CellResult], limit: int) -> tuple[int, str]:
    controls = [
        result.result for row, result in results.items() if row[1] <= limit and result.result in ("pass", "miss")
    ]
    misses = {row: result for row, result in results.items() if result.result == "miss"}
    passes = [row for row, result in results.items() if result.result == "pass"]
    open_ones = {row: result for row, result in results.items() if result.result in ("failed", "missing", "refused")}
    if controls and controls.count("miss") * 2 >= len(controls):
        why = next(iter(misses.values())).why
        return CANNOT_JUDGE, (
            f"cannot judge: {controls.count('miss')} of {len(controls)} missed at {limit:,} tokens or fewer, "
            f"where every entry is selected ({why})"
        )
    if misses:
        return DISAGREES, _describe(results, misses, limit) + ("" if controls else "; no control length was asked")
    if not passes or open_ones:
        first = next(iter(open_ones.values())).why if open_ones else "nothing was asked"
        return CANNOT_JUDGE, f"cannot judge: {len(open_ones)} of {len(results)} conversations have no answer ({first})"
    longest = max(row[1] for row in passes)
    exercised = "" if longest > limit else f"; selection not exercised below {limit:,} tokens"
    return (
        AGREES if longest > limit else NOT_EXERCISED
    ), f"all {len(passes)} remembered, up to {longest:,} tokens{exercised}"


def _describe(results: dict[Row, CellResult], misses: dict[Row, CellResult], limit: int) -> str:
    """Where forgetting begins: a cliff if nothing below a length is missed and little above it is kept."""
    answered = {row: result for row, result in results.items() if result.result in ("pass", "miss")}
    first = min(row[1] for row in misses)
    clean = [row[1] for row in answered if row[1] < first]
    beyond = [result.result for row, result in answered.items() if row[1] >= first]
    text = f"{len(misses)} of {len(answered)} missed, the first at {first:,} tokens"
    text += f"; clean up to {max(clean):,}" if clean else ""
    if beyond.count("miss") * 2 >= len(beyond) and first > limit:
        text += f"; a cliff: {beyond.count('miss')} of {len(beyond)} missed from there on"
    return text


def compare(left: dict[Row, CellResult], right: dict[Row, CellResult]) -> str:
    """One sentence on what differs between two servers."""
    both = [row for row in left if left[row].result in ("pass", "miss") and right[row].result in ("pass", "miss")]
    only_a = [row for row in both if left[row].result == "miss" and right[row].result == "pass"]
    only_b = [row for row in both if left[row].result == "pass" and right[row].result == "miss"]
    shared = [row for row in both if left[row].result == right[row].result == "miss"]
    same = sum(left[row].answers == right[row].answers for row in both)
    text = (
        f"A and B: {len(both)} compared, missed by A only {len(only_a)}, by B only {len(only_b)}, by both {len(shared)}"
    )
    return f"{text}; word for word the same answers in {same}"


def suites_of(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row[0] for row in rows))
