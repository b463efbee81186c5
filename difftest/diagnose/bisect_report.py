"""The report of a search: columns for a terminal, markdown for a pull request, JSON for machines."""

import json
from pathlib import Path

from rich.console import Console

from .outcome import Confirmation, Outcome, Step

JSON, MARKDOWN = "bisect.json", "bisect.md"
SHOWN_FILES = 20
SHA = 12


def save(outcome: Outcome, folder: Path) -> None:
    """Writes `bisect.json` and `bisect.md` into the run directory."""
    (folder / JSON).write_text(json.dumps(outcome.to_json(), indent=2) + "\n")
    (folder / MARKDOWN).write_text(markdown(outcome))


def show(outcome: Outcome, console: Console) -> None:
    """Prints facts and confirmations in aligned columns, the conclusion last. Verdicts were printed as they came."""
    rows = [*_facts(outcome), *_checks(outcome)]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}}  {value}" for name, value in rows]
    for line in ("", *lines, *(f"Note: {note}" for note in outcome.notes)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(outcome.sentence(), style="bold", markup=False, highlight=False, soft_wrap=True)


def markdown(outcome: Outcome) -> str:
    """The report for a job summary or an issue, the conclusion first."""
    lines = [f"**{outcome.sentence()}**", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in (*_facts(outcome), *_checks(outcome))]
    lines += [f"\nNote: {note}" for note in outcome.notes]
    lines += [
        "",
        "<details><summary>Verdicts</summary>",
        "",
        f"| asked for | {outcome.kind} | verdict | seconds | subject |",
    ]
    lines.append("|---|---|---|---:|---|")
    lines += [_row(step) for step in outcome.steps]
    return "\n".join([*lines, "", "</details>", ""])


def _row(step: Step) -> str:
    words, title = _cell(step.words), _cell(step.title)
    return f"| {step.purpose} | `{step.sha[:SHA]}` | {words} | {step.seconds:.1f} | {title} |"


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def _facts(outcome: Outcome) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    if outcome.culprit:
        commit = outcome.culprit
        more = len(commit.files) - SHOWN_FILES
        files = ", ".join(commit.files[:SHOWN_FILES]) + (f" and {more} more" if more > 0 else "")
        rows += [("commit", commit.sha), ("author", commit.author), ("date", commit.date)]
        rows += [("subject", commit.subject), ("files", files or "none")]
        if len(commit.parents) > 1:
            rows.append(("merge of", ", ".join(parent[:SHA] for parent in commit.parents)))
    if outcome.version:
        rows += [("first bad", outcome.version), ("last good", outcome.before)]
    rows += [("candidate", f"{commit.sha[:SHA]} {commit.subject}") for commit in outcome.candidates]
    rows += [("candidate", version) for version in outcome.possible]
    if outcome.found:
        rows.append(("stage", outcome.stage or "not named by the verdict command"))
    unchanged = f", {outcome.unchanged} of them not changing the named files" if outcome.unchanged else ""
    rows.append(("search", f"{outcome.verdicts} verdicts for {outcome.commits} {outcome.kind}s{unchanged}"))
    return [*rows, ("certainty", outcome.test)] if outcome.test else rows


def _checks(outcome: Outcome) -> list[tuple[str, str]]:
    return [("confirmed by", _check(check)) for check in outcome.confirmations]


def _check(check: Confirmation) -> str:
    why = f": {check.why}" if check.why else ""
    expected = f", expected {check.expected}" if check.contradicts else ""
    return f"{check.what} {check.sha[:SHA]}".strip() + f": {check.answer}{expected}{why}"
