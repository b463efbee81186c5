"""Turns records into verdicts under a policy; needs the records alone, so an old run can be judged again."""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from .record import Record
from .stages import STAGES, StageName, nearest
from .text import apart, place

Answer = Literal["agrees", "bug", "explained", "cannot judge"]
POLICIES = Path(__file__).parent / "policies"


@dataclass(frozen=True)
class Policy:
    """What is good enough. Fields are the keys of a policy file; `difftest/policies/default.toml` explains each."""

    name: str
    max_excess: float
    min_recall: float
    max_attention_error: float
    format_fails: bool


@dataclass(frozen=True)
class Verdict:
    """The answer for one case, layer and path. `text` says it in a sentence; `stage` is the first to blame, or None."""

    case: str
    layer: int
    path: str
    answer: Answer
    stage: StageName | None
    text: str
    exit_code: int

    def __str__(self) -> str:
        return f"{self.case} layer {self.layer} {self.path}: {self.text}"

    def to_json(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def load_policy(name_or_path: str) -> Policy:
    """A shipped policy by name (strict, default, exploratory) or any TOML file with the same keys.

    Raises ValueError for an unknown name, an unknown or missing key, or a value of the wrong type.
    """
    shipped = POLICIES / f"{name_or_path}.toml"
    file = shipped if shipped.is_file() else Path(name_or_path)
    if not file.is_file():
        raise ValueError(nearest(name_or_path, [known.stem for known in POLICIES.glob("*.toml")], "policy"))
    try:
        raw = tomllib.loads(file.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{file} is not TOML: {error}") from error
    keys = {field.name: field.type for field in fields(Policy) if field.name != "name"}
    if set(raw) != set(keys):
        wrong = sorted(set(raw) ^ set(keys))
        raise ValueError(f"{file}: {', '.join(wrong)} is unknown or missing; a policy has exactly {', '.join(keys)}")
    for key, value in raw.items():
        if not isinstance(value, bool if keys[key] is bool else int | float) or (keys[key] is float and value is True):
            raise ValueError(f"{file}: {key} = {value!r} should be a {'true or false' if keys[key] is bool else 'number'}")
    return Policy(file.stem, **raw)


def judge(records: Iterable[Record], policy: Policy) -> list[Verdict]:
    """One verdict for each (case, layer, path), in the order in which they first appear in the records."""
    groups: dict[tuple[str, int, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.case, record.layer, record.path), []).append(record)
    return [_verdict(key, group, policy) for key, group in groups.items()]


def failing(record: Record, policy: Policy) -> bool:
    """Whether an isolated record fails: a finding, or a metric above its bound times the policy's factor."""
    if record.comparison != "isolated":
        return False
    over = (record.metrics.get(name, 0.0) > bound * policy.max_excess for name, bound in record.bounds.items())
    return bool(record.findings) or (not record.skipped and any(over))


def first_failure(records: Iterable[Record], policy: Policy) -> Record | None:
    """The failing isolated record that comes first in stage order (earliest layer first)."""
    order = list(STAGES)
    bad = [record for record in records if failing(record, policy)]
    return min(bad, key=lambda record: (record.layer, order.index(record.stage)), default=None)


def _verdict(key: tuple[str, int, str], records: list[Record], policy: Policy) -> Verdict:
    bad = first_failure(records, policy)
    if bad:
        return Verdict(*key, "bug", bad.stage, f"bug at stage {bad.stage}: {describe(bad, policy)}", 1)
    skipped = [record for record in records if record.comparison == "isolated" and record.skipped]
    unexercised = [record for record in skipped if record.skipped == "selection not exercised"]
    blocked = [record for record in skipped if record not in unexercised]
    if blocked:
        return Verdict(*key, "cannot judge", blocked[0].stage, f"cannot judge at {blocked[0].stage}: {blocked[0].skipped}", 125)
    if not any(record.comparison == "isolated" for record in records):
        return Verdict(*key, "cannot judge", None, "cannot judge: no isolated check was made", 125)
    short = _shortfall(records, policy)
    if short:
        stage, text = _format_at_fault(records)
        code = 1 if policy.format_fails else 0
        return Verdict(*key, "explained", stage, f"explained by {text}: {short}", code)
    note = " (selection not exercised: every row selects all it sees)" if unexercised else ""
    return Verdict(*key, "agrees", None, f"agrees{note}", 0)


def _quality(records: Iterable[Record], stage: StageName, metric: str) -> float | None:
    for record in records:
        if record.comparison == "accumulated" and record.stage == stage and metric in record.metrics:
            return record.metrics[metric]
    return None


def _shortfall(records: list[Record], policy: Policy) -> str:
    recall = _quality(records, "topk", "recall")
    error = _quality(records, "attention", "relative_error")
    parts = []
    if recall is not None and recall < policy.min_recall:
        parts.append("recall {} is below {}".format(*apart(recall, policy.min_recall)))
    if error is not None and error > policy.max_attention_error:
        parts.append("attention error {} is above {}".format(*apart(error, policy.max_attention_error)))
    return ", ".join(parts)


def _format_at_fault(records: list[Record]) -> tuple[StageName, str]:
    """The stage whose accumulated relative error is largest among those that store in a format, and that format."""
    stored = [
        record
        for record in records
        if record.comparison == "accumulated" and record.stage in ("index_k", "index_q", "kv", "head_weight")
    ]
    if not stored:
        return "score", "its number formats"
    worst = max(stored, key=lambda record: record.metrics.get("relative_error", 0.0))
    return worst.stage, f"format {worst.facts.get('format', 'of the path')} at stage {worst.stage}"


def describe(record: Record, policy: Policy) -> str:
    """What is wrong in one line: the finding, or the worst element, both values, its bound and what would have passed."""
    if record.findings:
        more = f" (and {len(record.findings) - 1} more findings)" if len(record.findings) > 1 else ""
        return f"{record.findings[0].rule}: {record.findings[0].message}{more}"
    for name, bound in record.bounds.items():
        value = record.metrics.get(name, 0.0)
        if value > bound * policy.max_excess:
            if name == "excess" and record.worst:
                return _worst(record)
            return "{} {} is above its bound {}".format(name, *apart(value, bound * policy.max_excess))
    return "nothing is outside its bound"


def _worst(record: Record) -> str:
    worst, excess = record.worst, record.metrics["excess"]
    assert worst is not None
    got, want = apart(worst.got, worst.want)
    return (
        f"{place(worst.where)}: got {got}, want {want} within {worst.bound:.3g}; "
        f"the bound would have to be {excess:.4g} times as large"
    )


def explain_failure(verdict: Verdict, records: Iterable[Record]) -> str:
    """First line: what diverged first. Then one line a stage up to it, so that what was verified before is in sight."""
    lines = [str(verdict)]
    for record in records:
        if record.comparison == "isolated" and (record.case, record.layer, record.path) == (
            verdict.case,
            verdict.layer,
            verdict.path,
        ):
            excess = record.metrics.get("excess")
            state = record.skipped or ("FAILS" if record.stage == verdict.stage else "ok")
            lines.append(f"  {record.stage:<12} {state}" + ("" if excess is None else f", excess {excess:.3g} of 1"))
    lines.append(f"reproduce: difftest run --case {verdict.case} --layer {verdict.layer} --path {verdict.path}")
    return "\n".join(lines)
