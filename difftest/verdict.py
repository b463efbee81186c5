"""Verdicts, from records alone: agrees, bug at a stage, explained by a format, or cannot judge, and why."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from .policy import Budget, Policy, load_policy
from .record import Record, Worst
from .stages import STAGES, StageName
from .text import apart, place

__all__ = [
    "Answer",
    "Policy",
    "Summary",
    "Verdict",
    "explain_failure",
    "failing",
    "first_divergence",
    "first_failure",
    "judge",
    "load_policy",
    "overall",
]

Answer = Literal["agrees", "explained", "cannot judge", "bug"]
EXIT_CODES: dict[Answer, int] = {"agrees": 0, "explained": 0, "bug": 1, "cannot judge": 125}
SEVERITY: tuple[Answer, ...] = ("agrees", "explained", "cannot judge", "bug")

NOT_EXERCISED = "selection not exercised"
ORACLE = "oracle"
CRASH = "crash"


@dataclass(frozen=True)
class Verdict:
    """What a policy says about one path on one layer of one case.

    stage     bug: the first stage, in order, whose check failed. explained: the stage whose format costs most.
    rule      what failed: `excess`, another bounded metric, the rule of a finding, or the budget.
    format    explained: the declared format of that stage.
    worst     the element furthest off in units of its bound, with both values.
    needed    the smallest factor on the bound with which the failed rule would have passed (infinite for findings).
    exit_code  0 agrees, 1 bug, 125 cannot judge; explained: 1 under a policy that lets formats fail, else 0.
    notes     what else a reader should know: unexercised selection, accumulated findings under a lenient policy.
    """

    case: str
    layer: int
    kind: str
    path: str
    answer: Answer
    why: str
    exit_code: int
    stage: StageName | None = None
    rule: str = ""
    format: str = ""
    worst: Worst | None = None
    needed: float = 0.0
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def headline(self) -> str:
        """agrees / bug at index_k / explained by format e4m3 at index_k / cannot judge."""
        if self.answer == "bug":
            return f"bug at {self.stage}"
        if self.answer == "explained":
            return f"explained by format {self.format or 'as declared'} at {self.stage}"
        return self.answer

    @property
    def text(self) -> str:
        """The whole verdict in a sentence."""
        notes = "".join(f" ({note})" for note in self.notes)
        return f"{self.headline}{f': {self.why}' if self.why else ''}{notes}"

    def __str__(self) -> str:
        return f"{self.case} layer {self.layer} {self.path}: {self.text}"

    def to_json(self) -> dict[str, Any]:
        """Plain values; infinities become strings, since JSON has none. `text` is the sentence people read."""
        raw = asdict(self)
        raw["needed"] = _plain(self.needed)
        if self.worst:
            raw["worst"] = {name: _plain(value) for name, value in asdict(self.worst).items()}
        return {**raw, "headline": self.headline, "text": self.text}


def _plain(value: Any) -> Any:
    finite = not isinstance(value, float) or value - value == 0
    return value if finite else str(value)


@dataclass(frozen=True)
class Summary:
    """A path's verdicts together: the worst answer, the verdict that shows it first, and how many there are of each."""

    path: str
    answer: Answer
    first: Verdict
    counts: dict[str, int]


def judge(records: Iterable[Record], policy: Policy) -> list[Verdict]:
    """One verdict for each (case, layer, path), in the order in which they first appear.

    Isolated records decide first, in stage order: the first that fails is the bug. Without a failure, a skipped record
    means `cannot judge`. Then accumulated findings, then budgets, both only against the oracle.
    """
    groups: dict[tuple[str, int, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.case, record.layer, record.path), []).append(record)
    return [_judge_one(group, policy) for group in groups.values()]


def overall(verdicts: Sequence[Verdict]) -> list[Summary]:
    """One summary a path; `first` is the earliest layer and stage with the worst answer."""
    order = list(STAGES)
    summaries = []
    for path in dict.fromkeys(verdict.path for verdict in verdicts):
        mine = [verdict for verdict in verdicts if verdict.path == path]
        worst = max((verdict.answer for verdict in mine), key=SEVERITY.index)
        shown = [verdict for verdict in mine if verdict.answer == worst]
        first = min(shown, key=lambda verdict: (verdict.layer, order.index(verdict.stage) if verdict.stage else -1))
        counts = {answer: sum(verdict.answer == answer for verdict in mine) for answer in SEVERITY}
        summaries.append(Summary(path, worst, first, {name: count for name, count in counts.items() if count}))
    return summaries


def first_divergence(verdicts: Iterable[Verdict]) -> Verdict | None:
    """The bug in the earliest layer and stage, whichever case and path; None if there is none."""
    order = list(STAGES)
    bugs = (verdict for verdict in verdicts if verdict.answer == "bug" and verdict.stage)
    return min(bugs, key=lambda bug: (bug.layer, order.index(bug.stage or order[0])), default=None)


def _judge_one(records: list[Record], policy: Policy) -> Verdict:
    order = list(STAGES)
    isolated = sorted((r for r in records if r.comparison == "isolated"), key=lambda r: order.index(r.stage))
    accumulated = [r for r in records if r.comparison == "accumulated" and r.against == ORACLE]
    for record in isolated:
        failed = failure(record, policy)
        if failed:
            verified = ", ".join(one.stage for one in isolated[: isolated.index(record)]) or "nothing"
            return _verdict(
                record,
                "bug",
                failed.why + (f"; verified before it: {verified}" if failed.rule == CRASH else ""),
                stage=record.stage,
                rule=failed.rule,
                worst=failed.worst,
                needed=failed.needed,
            )
    found = [(record, finding) for record in accumulated for finding in record.findings]
    if found and policy.accumulated_findings == "bug":
        record, finding = found[0]
        return _verdict(
            record,
            "bug",
            finding.message,
            stage=record.stage,
            rule=finding.rule,
            worst=record.worst,
            needed=float("inf"),
        )
    notes = tuple(finding.message for _, finding in found)
    skipped = [record for record in isolated if record.skipped]
    blocked = [record for record in skipped if record.skipped != NOT_EXERCISED]
    if blocked:
        return _verdict(blocked[0], "cannot judge", f"{blocked[0].stage}: {blocked[0].skipped}", notes=notes)
    if skipped:
        longest = skipped[0].facts.get("why", "")
        if policy.unexercised == "cannot judge":
            rest = "; every other stage agrees" if len(isolated) > 1 else ""
            return _verdict(skipped[0], "cannot judge", f"{NOT_EXERCISED}: {longest}{rest}", notes=notes)
        notes = (f"{NOT_EXERCISED}: {longest}", *notes)
    missed = [(budget, record) for budget in policy.budgets for record in accumulated if budget.missed(record)]
    if missed:
        return _explained(*missed[0], records, policy, notes)
    if not isolated and not accumulated:
        return _verdict(
            records[0], "cannot judge", "nothing was compared with the exact stage or the oracle", notes=notes
        )
    return _verdict(records[0], "agrees", "", notes=notes)


def failing(record: Record, policy: Policy) -> bool:
    """Whether an isolated record breaks a rule."""
    return record.comparison == "isolated" and failure(record, policy) is not None


def first_failure(records: Iterable[Record], policy: Policy) -> Record | None:
    """The failing isolated record of the earliest layer that comes first in stage order."""
    order = list(STAGES)
    bad = [record for record in records if failing(record, policy)]
    return min(bad, key=lambda record: (record.layer, order.index(record.stage)), default=None)


def _verdict(record: Record, answer: Answer, why: str, **rest: Any) -> Verdict:
    code = rest.pop("exit_code", EXIT_CODES[answer])
    return Verdict(record.case, record.layer, record.kind, record.path, answer, why, code, **rest)


@dataclass(frozen=True)
class Failure:
    """Why an isolated record fails: rule, sentence, worst element and the smallest factor that would have passed."""

    rule: str
    why: str
    worst: Worst | None
    needed: float


def failure(record: Record, policy: Policy) -> Failure | None:
    """The first rule an isolated record breaks: its findings, then every metric that has a bound and a factor."""
    if record.findings:
        finding = record.findings[0]
        more = f" (and {len(record.findings) - 1} more findings)" if len(record.findings) > 1 else ""
        return Failure(finding.rule, finding.message + more, record.worst, float("inf"))
    for metric, factor in policy.isolated.items():
        if metric not in record.metrics or metric not in record.bounds:
            continue
        value, bound = record.metrics[metric], record.bounds[metric]
        if value <= factor * bound:
            continue
        needed = value / bound if bound else float("inf")
        if metric == "excess" and record.worst:
            return Failure(metric, _worst_sentence(record.worst, value, record.facts), record.worst, needed)
        shown, limit = apart(value, factor * bound)
        where = _where_fact(metric, record.facts)
        return Failure(
            metric,
            f"{metric} {shown}{where} exceeds its bound {limit}; passes from {needed:.4g} times it",
            record.worst,
            needed,
        )
    return None


def _where_fact(metric: str, facts: dict[str, Any]) -> str:
    named = {"gain": ("gain_head", "head"), "row_rms": ("worst_row", "row")}
    key, word = named.get(metric, ("", ""))
    return f" at {word} {facts[key]}" if key in facts else ""


def _worst_sentence(worst: Worst, excess: float, facts: dict[str, Any]) -> str:
    """ "row 3, entry 70: got 1.2346, exact 1.2345, bound 2e-06; passes from 51.2 times the bound"."""
    got, want = apart(worst.got, worst.want)
    unit = f" ({facts['worst_unit']})" if "worst_unit" in facts else ""
    needed, bound = excess * worst.bound, worst.bound
    if excess == float("inf"):
        rest = f"bound {bound:.4g}; no bound covers it"
    else:
        needed_text, bound_text = apart(needed, bound)
        rest = f"bound {bound_text}; the smallest that passes is {needed_text} ({excess:.4g} times)"
    return f"{place(worst.where)}{unit}: got {got}, exact {want}, {rest}"


CAUSES: dict[StageName, tuple[tuple[str, StageName], ...]] = {
    "score": (
        ("format_index_k", "index_k"),
        ("format_index_q", "index_q"),
        ("format_head_weight", "head_weight"),
        ("arithmetic_error", "score"),
    ),
    "attention": (("selection_error", "topk"), ("format_error", "kv"), ("arithmetic_error", "attention")),
}
"""Metrics of an accumulated record that split its error, and the stage each of them points at."""


def _explained(
    budget: Budget, record: Record, records: list[Record], policy: Policy, notes: tuple[str, ...]
) -> Verdict:
    """A missed budget without an isolated failure: names the stage with the largest share of the error."""
    by_stage = {r.stage: r for r in records if r.comparison == "accumulated" and r.against == record.against}
    stage, shares = _largest_share("score" if budget.stage == "topk" else budget.stage, by_stage)
    if stage == "topk":
        stage, more = _largest_share("score", by_stage)
        shares += f"; of the scores: {more}" if more else ""
    formats = {r.stage: str(r.facts["format"]) for r in records if r.comparison == "isolated" and "format" in r.facts}
    value, limit = apart(
        record.metrics[budget.metric], budget.min if budget.min is not None else float(budget.max or 0)
    )
    side = "below" if budget.min is not None else "above"
    why = f"{budget.stage} {budget.metric} {value} is {side} the budget {limit}" + (
        f"; shares: {shares}" if shares else ""
    )
    return _verdict(
        record,
        "explained",
        why,
        stage=stage or budget.stage,
        rule=str(budget),
        format=formats.get(stage or budget.stage, ""),
        worst=record.worst,
        notes=notes,
        exit_code=int(policy.format_fails),
    )


def _largest_share(stage: StageName, by_stage: dict[StageName, Record]) -> tuple[StageName | None, str]:
    record = by_stage.get(stage)
    causes = CAUSES.get(stage, ())
    if record is None or not causes:
        return (stage if record else None), ""
    shares = [(record.metrics[metric], cause) for metric, cause in causes if metric in record.metrics]
    if not shares:
        return stage, ""
    text = ", ".join(f"{cause} {value:.3g}" for value, cause in sorted(shares, reverse=True))
    return max(shares)[1], text


def explain_failure(verdict: Verdict, records: Iterable[Record]) -> str:
    """A red verdict for people: the divergence first, then one line a stage, then how to run it again."""
    mine = [r for r in records if (r.case, r.layer, r.path) == (verdict.case, verdict.layer, verdict.path)]
    lines = [str(verdict)]
    isolated = [record for record in mine if record.comparison == "isolated"]
    for record in isolated:
        lines.append("  " + _stage_line(record))
    at = next((record for record in isolated if record.stage == verdict.stage), None)
    for finding in at.findings if at else []:
        lines.append(f"  {finding.rule}: {finding.message}")
    lines.append(f"  run again: difftest run --case {verdict.case} --layer {verdict.layer} --path {verdict.path}")
    return "\n".join(lines)


def _stage_line(record: Record) -> str:
    if record.skipped:
        return f"{record.stage:<12} skipped: {record.skipped}"
    parts = []
    for metric in ("deviation", "excess", "rms", "row_rms", "gain", "gain_all"):
        if metric in record.metrics and metric in record.bounds:
            parts.append(f"{metric} {record.metrics[metric]:.3g} / {record.bounds[metric]:.3g}")
    unit = f" ({record.facts['unit']})" if "unit" in record.facts else ""
    found = f"  {len(record.findings)} findings" if record.findings else ""
    return f"{record.stage:<12} {', '.join(parts)}{unit}{found}"
