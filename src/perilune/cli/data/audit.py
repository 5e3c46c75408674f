"""`perilune environments audit` and `replay`: find wrong outputs that get a reward."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perilune.cli.arguments import Json
from perilune.cli.output import as_markup, echo, make_console, print_json
from perilune.control.evidence.reward_grades import read_grade, store_grade
from perilune.control.record.home import Home
from perilune.environments.core.registry import file_fields, part_sections
from perilune.errors import RequestError, WorkFailedError
from perilune.extensions import is_file_reference
from perilune.files import read_regular, write_json
from perilune.plan.checks import distinct_environments
from perilune.recipe.load import load_recipe
from perilune.recipe.schema import Recipe

if TYPE_CHECKING:
    from perilune.verifiers.audit import Audit, Example

EXAMPLE_CHARACTERS = 60  # characters of an example in the table


def audit_environments(
    sections: list[dict[str, Any]], *, tasks: int, search: int, seed: int, as_json: bool, out: Path | None
) -> None:
    """Audit each environment and print the findings, or a table of grades for several environments.

    Raises:
        RequestError: when a section is wrong, or its environment has no tasks.
    """
    from perilune.verifiers.audit import audit_reward

    home = Home.open()
    audits: list[Audit] = []
    for section in sections:
        name = _environment_name(section)

        def print_line(what: str, name: str = name) -> None:
            echo(f"{name}: {what}", err=True)

        try:
            audit = audit_reward(
                section, tasks=tasks, search_budget=search, seed=seed, on_progress=print_line
            )
            store_grade(home, section, _environment_files(section), audit.grade, _worst_finding(audit))
            audits.append(audit)
        except (RequestError, WorkFailedError) as error:
            if len(sections) == 1:
                raise
            echo(f"{name}: not audited: {error}", err=True)
    documents = [audit.to_json() for audit in audits]
    document = documents[0] if len(sections) == 1 else documents
    if out is not None:
        write_json(out, document)
    if as_json:
        print_json(document)
    elif len(sections) == 1:
        _show(audits[0], out)
    else:
        _show_grades(audits)


def load_recipe_environments(name: str, changes: Sequence[str]) -> list[dict[str, Any]]:
    """Return the distinct environments of a recipe's stages, with the recipe's rewards.

    Raises:
        RequestError: when the recipe is wrong, or has no environment.
    """
    sections = distinct_environments(load_recipe(name, changes))
    if not sections:
        raise RequestError("the recipe has no environment, so it has no reward to audit", where=name)
    return sections


def print_grades(recipe: Recipe, command: str) -> None:
    """Print the last audit of each reward of the recipe; `command` audits them."""
    rows = load_grades(recipe)
    for row in rows:
        if row["grade"] is not None:
            name = f"{row['environment']}: " if len(rows) > 1 else ""
            day = time.strftime("%Y-%m-%d", time.gmtime(row["time"]))
            echo(f"  reward   {name}grade {row['grade']} on {day}: {row['worst'] or 'no findings'}")
    missing = [row["environment"] for row in rows if row["grade"] is None]
    if missing:
        names = f" ({', '.join(missing)})" if len(rows) > 1 else ""
        echo(f"  reward   not audited{names}: {command}")


def load_grades(recipe: Recipe) -> list[dict[str, Any]]:
    """Return the last audit of each reward of the recipe in this home; without one, its grade is None."""
    home = Home.open()
    return [
        {
            "environment": _environment_name(section),
            **(read_grade(home, section, _environment_files(section)) or {"grade": None}),
        }
        for section in distinct_environments(recipe)
    ]


def _environment_files(section: Mapping[str, Any]) -> list[Path]:
    return [Path(path) for path in file_fields(section).values()]


def _environment_name(section: Mapping[str, Any]) -> str:
    return "/".join(str(section[key]) for key in ("id", "task") if key in section)


def replay(
    file: Annotated[
        Path, typer.Argument(metavar="AUDIT.json", help="A file that `environments audit --out` wrote.")
    ],
    *,
    as_json: Json = False,
) -> None:
    """Score the example of every finding again. Exits with 1 when a verdict has changed."""
    from perilune.verifiers.audit import Audit
    from perilune.verifiers.audit.audit import replay_examples

    try:
        raw = json.loads(read_regular(file))
        audits = [Audit.from_json(document) for document in (raw if isinstance(raw, list) else [raw])]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"the file is not an audit: {error}", where=str(file)) from None
    for audit in audits:
        _refuse_code(audit.environment, file)
    rows = [
        {"probe": finding.probe, "what": finding.what, "then": finding.example.verdict, "now": now}
        for audit in audits
        for finding, now in replay_examples(audit)
    ]
    if as_json:
        print_json(rows)
    else:
        for row in rows:
            same = "same" if row["then"] == row["now"] else "CHANGED"
            echo(f"{same}  {row['probe']}: {row['then']} -> {row['now']}")
    changed = sum(row["then"] != row["now"] for row in rows)
    if changed:
        raise WorkFailedError(f"{changed} of {len(rows)} verdicts have changed", where=str(file))


def _refuse_code(section: Mapping[str, Any], file: Path) -> None:
    """Refuse to run the code of an environment that a saved audit holds."""
    for part in (section, *part_sections(section).values()):
        if is_file_reference(part.get("id")):
            raise RequestError(
                f"the audit holds the code of {part['id']}, which is not run from a saved file",
                where=str(file),
                remedy="audit the recipe again",
            )


def _show(audit: Audit, out: Path | None) -> None:
    from rich.table import Table

    from perilune.verifiers.audit.findings import GRADE_MEANINGS

    echo(f"grade {audit.grade}: {GRADE_MEANINGS[audit.grade]}")
    echo(f"{audit.judged:,} outputs scored on {audit.tasks} tasks, {audit.searched:,} of them in the search")
    if audit.form != "…":
        echo(f"the reward accepts answers in the form {audit.form!r}, where … is the stated answer")
    if audit.without_gold:
        echo(f"{audit.without_gold} tasks state no answer, so no probe was made from it. The method `gold`")
        echo("of an environment states it: docs/how-to/reward-audit.md")
    if not audit.searched:
        echo("no search: --search is 0, or no output is known to be wrong without a second opinion")
    if audit.unjudged:
        echo(f"{audit.unjudged:,} rewarded outputs are unverified: only the scorer can judge them")
    if not audit.findings:
        return
    table = Table("grade", "probe", "finding", "tasks", "for example", "verdict")
    for finding in audit.findings:
        example = map(as_markup, (_format_example(finding.example), _format_verdict(finding.example)))
        table.add_row(finding.grade, finding.probe, finding.what, str(finding.tasks), *example)
    make_console().print(table)
    if out is None:
        echo("--out FILE.json saves the full examples; `perilune environments replay` scores them again")


def _show_grades(audits: list[Audit]) -> None:
    for audit in sorted(audits, key=lambda audit: audit.grade, reverse=True):
        name = _environment_name(audit.environment)
        echo(f"{audit.grade}  {name:45} {_worst_finding(audit)}")


def _worst_finding(audit: Audit) -> str:
    return f"{audit.findings[0].probe}: {audit.findings[0].what}" if audit.findings else ""


def _format_example(example: Example) -> str:
    text = repr(example.transcript.text)
    if len(text) <= EXAMPLE_CHARACTERS:
        return text
    return f"{text[:EXAMPLE_CHARACTERS]}… ({len(example.transcript.text):,} characters)"


def _format_verdict(example: Example) -> str:
    verdict = example.verdict
    return f"{verdict:.4g}" if isinstance(verdict, float) else verdict[:EXAMPLE_CHARACTERS]
