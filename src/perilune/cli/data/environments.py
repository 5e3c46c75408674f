"""`perilune environments`: list environments, show their settings and tasks, check and audit them."""

import json
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from pydantic import BaseModel

from perilune.cli.arguments import (
    EnvironmentFields,
    Json,
    SplitOption,
    check_output_file,
    find_checkpoint,
    make_command_group,
)
from perilune.cli.data.audit import audit_environments, load_recipe_environments, replay
from perilune.cli.data.prompt_tokens import print_facts, print_tokens, recipe_source, token_document
from perilune.cli.output import echo, print_json
from perilune.environments import Environment, Failure, Split, Task, Transcript
from perilune.environments.adapters.compact import PROMPTS
from perilune.environments.core.registry import (
    SOURCE,
    environment_families,
    environment_ids,
    environment_notes,
    environment_spec,
    environment_summary,
    family_field,
    make_environment,
)
from perilune.environments.core.replay import replay_conversation
from perilune.errors import RequestError, WorkFailedError
from perilune.extensions import is_file_reference
from perilune.plan.checks import MAX_COUNTED_TASKS
from perilune.recipe.load import bundled_recipes
from perilune.recipe.reward_files import load_reward_terms, read_source_file
from perilune.recipe.source import parse_yaml

app = make_command_group("List, show, sample, check and audit environments.")

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="Id of an environment with its family or game (reasoning_gym/chain_sum), or file.py:Class.",
    ),
]


@app.command("list", epilog="Example: perilune environments list reasoning_gym")
def list_environments(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Id of an environment whose families or games to list."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List environments; with NAME or --json, also their families and games."""
    rows = []
    for identifier in environment_ids() if name is None else (name,):
        try:
            families, missing = environment_families(identifier), None
        except RequestError as error:  # unknown, or its package is not installed
            if identifier not in environment_ids():
                raise
            families, missing = (), f"{error.what}: {error.remedy}"
        names = [f"{identifier}/{family}" for family in families] or [identifier]
        compact = [family in PROMPTS for family in families] or [False]
        if as_json or name is not None:
            rows += [
                {"name": n, "compact_prompt": c, "missing": missing}
                for n, c in zip(names, compact, strict=True)
            ]
        else:
            short = f", {sum(compact)} with a compact prompt" if any(compact) else ""
            kind = "families" if family_field(identifier) == "task" else f"{family_field(identifier)}s"
            counted = f" {len(families)} {kind}{short}." if families else ""
            echo(f"{identifier:16} {missing or environment_summary(identifier) + counted}")
    if as_json:
        print_json(rows)
    elif name is None:
        echo("to list the families or games: perilune environments list NAME")
    else:
        for row in rows:
            echo(f"{row['name']}{'  (compact)' if row['compact_prompt'] else ''}")


@app.command(
    epilog="Example: perilune environments show reasoning_gym/chain_sum --set config.max_terms=2 --count"
)
def show(
    name: Name,
    settings: EnvironmentFields = [],  # noqa: B006  # typer reads the default and never changes it
    *,
    count: Annotated[
        bool, typer.Option("--count", help=f"Count the tasks of each split, up to {MAX_COUNTED_TASKS:,}.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the fields of an environment that a recipe can set, and the settings of its family."""
    section = environment_section(name, settings)
    model = environment_spec(section["id"], section.get("source"))
    fields: dict[str, dict[str, Any]] = {}
    for field, info in (model.model_fields if model else {}).items():
        default = None if info.is_required() else info.get_default(call_default_factory=True)
        fields[field] = {
            "default": default.model_dump(mode="json") if isinstance(default, BaseModel) else default,
            "required": info.is_required(),
            "description": info.description or "",
        }
    missing = {field for field, facts in fields.items() if facts["required"]} - set(section)
    environment = None if missing else make_environment(section)
    config: dict[str, Any] = getattr(environment, "settings", dict)()
    tasks = _count_tasks(environment) if count and environment is not None else {}
    notes = environment_notes(section["id"])
    players, turns = getattr(environment, "players", None), getattr(environment, "max_turns", None)
    if as_json:
        form = {"players": players, "max_turns": turns}
        counted = {"tasks": tasks} if tasks else {}
        print_json({"name": name, **form, **counted, "fields": fields, "config": config, "notes": notes})
        return
    echo(f"environment: {json.dumps({key: value for key, value in section.items() if key != SOURCE})}")
    if turns is not None and (turns > 1 or players != 1):
        echo(f"  {players} player{'s' * (players != 1)}, at most {turns} turns")
    for field, facts in fields.items():
        text = "required" if facts["required"] else json.dumps(facts["default"])
        echo(f"  {field:10} {text:14} {facts['description']}")
    for setting, value in config.items():
        echo(f"  config.{setting}: {json.dumps(value, default=str)}")
    for split, number in tasks.items():
        echo(f"  {split} tasks: {number:,}{' or more' if number == MAX_COUNTED_TASKS else ''}")
    for heading, lines in notes.items():
        echo(f"  {heading}")
        for topic, line in lines.items():
            echo(f"    {topic:14} {line}")


@app.command(
    epilog="Example: perilune environments sample reasoning_gym/chain_sum "
    "--set prompt=compact --set config.max_terms=2 -n 5"
)
def sample(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|RECIPE",
            help="Id of an environment with its family or game, or a recipe with a model.",
        ),
    ],
    settings: EnvironmentFields = [],  # noqa: B006  # typer reads the default and never changes it
    *,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="Number of tasks.")] = 5,
    split: SplitOption = "train",
    seed: Annotated[int, typer.Option(help="Seed that selects the tasks and their order.")] = 0,
    model: Annotated[
        str, typer.Option(metavar="CHECKPOINT", help="Show the prompts as the tokens that this model sees.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Print tasks with prompt, a right answer, difficulty and the score of this answer.

    For an environment with several turns, prints the whole episode of a right answer. For a recipe, or with
    --model, prints each prompt token by token, as the model's chat template renders it.
    """
    from perilune.models.text.template_facts import template_facts
    from perilune.models.text.tokenizer import Tokenizer

    tokenizer = None
    if _is_recipe(name):
        section, tokenizer = recipe_source(name, settings)
    else:
        section = environment_section(name, settings)
    tokenizer = Tokenizer.load(find_checkpoint(model)) if model else tokenizer
    environment = make_environment(section)
    tasks = list(islice(environment.tasks(split, seed), count))
    rows = [
        _row(environment, task) | ({} if tokenizer is None else token_document(tokenizer, environment, task))
        for task in tasks
    ]
    facts = {} if tokenizer is None else {"template": asdict(template_facts(tokenizer))}
    if as_json:
        print_json({"environment": environment.id, "split": split, "seed": seed, **facts, "tasks": rows})
        return
    if tokenizer is not None and tokenizer.chat_template is not None:
        print_facts(facts["template"])
    for row in rows:
        difficulty = "" if row["difficulty"] is None else f", difficulty {row['difficulty']:g}"
        echo(f"{row['task_id']}{difficulty}")
        if tokenizer is None:
            echo(f"  prompt  {_indent(row['prompt'])}")
        else:
            print_tokens(row)
        for message in row["turns"]:
            echo(f"  {message['role']:9} {_indent(message['content'].rstrip())}")
        scores = "" if row["score"] is None else f"   scores {row['score']}"
        echo(f"  answer  {_indent(row['answer'])}{scores}")


@app.command(epilog="Example: perilune environments check calculator")
def check(
    name: Name,
    settings: EnvironmentFields = [],  # noqa: B006  # typer reads the default and never changes it
    *,
    tasks: Annotated[int, typer.Option(min=1, help="Number of tasks to play.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed that selects the tasks and the play.")] = 0,
    as_json: Json = False,
) -> None:
    """Play an environment and check the rules that every environment must follow."""
    from perilune.verifiers.conformance import check_environment

    with redirect_stdout(sys.stderr):  # what the environment prints is no part of the report
        report = check_environment(environment_section(name, settings), tasks=tasks, seed=seed)
    if as_json:
        findings = [asdict(finding) for finding in report.findings]
        print_json({"name": name, "checked": report.checked, "findings": findings})
    for rule, times in () if as_json else report.checked.items():
        wrong = [finding for finding in report.findings if finding.check == rule]
        echo(f"{'FAILS ' if wrong else 'holds '} {rule} ({times - len(wrong)} of {times})")
        for finding in wrong[:3]:
            echo(f"         {finding.what}{f', task {finding.task_id}' if finding.task_id else ''}")
    if report.findings:
        broken = len({finding.check for finding in report.findings})
        raise WorkFailedError(
            f"{name} breaks {broken} of the {len(report.checked)} rules for environments",
            where=report.findings[0].check,
        )


@app.command(
    epilog="Example: perilune environments audit reasoning_gym/chain_sum --set strict=false --out audit.json"
)
def audit(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|RECIPE",
            help="Id of an environment with its family or game, or a recipe, as for `perilune run`.",
        ),
    ],
    settings: EnvironmentFields = [],  # noqa: B006  # typer reads the default and never changes it
    *,
    tasks: Annotated[int, typer.Option(min=1, help="Number of tasks to probe.")] = 8,
    search: Annotated[
        int, typer.Option(min=0, help="Outputs that the search tries on each of 3 tasks.")
    ] = 480,
    seed: Annotated[
        int, typer.Option(help="Seed that selects the tasks, the probes and the outputs of the search.")
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            dir_okay=False,
            callback=check_output_file,
            help="File for the audit, which `environments replay` reads.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Find wrong outputs that get a reward, before a policy finds them.

    For a recipe, audits its environments with the recipe's rewards; --set then sets keys of the recipe. For
    an environment without a family, audits all families.
    """
    if _is_recipe(name):
        sections = load_recipe_environments(name, settings)
    else:
        section = environment_section(name, settings)
        whole = "task" not in section and family_field(section["id"]) == "task"
        families = environment_families(section["id"]) if whole else ()
        sections = [section | {"task": family} for family in families] or [section]
    audit_environments(sections, tasks=tasks, search=search, seed=seed, as_json=as_json, out=out)


app.command(epilog="Example: perilune environments replay audit.json")(replay)


def _is_recipe(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) or (name in bundled_recipes() and name not in environment_ids())


def _row(environment: Environment, task: Task) -> dict[str, Any]:
    stated = getattr(environment, "gold", _answer_in_data)(task)
    outcome = None if stated is None else environment.score(task, stated)
    scored = str(outcome) if isinstance(outcome, Failure) else outcome and outcome.reward
    return {
        "task_id": task.task_id,
        "prompt": "\n".join(message["content"] for message in task.prompt),
        "turns": []
        if stated is None or not stated.earlier
        else [dict(turn) for turn in replay_conversation(environment, task, stated)[len(task.prompt) : -1]],
        "answer": None if stated is None else stated.text,
        "difficulty": task.difficulty,
        "score": scored,
    }


def _count_tasks(environment: Environment) -> dict[str, int]:
    return {
        split: sum(1 for _ in islice(environment.tasks(split, 0), MAX_COUNTED_TASKS))
        for split in get_args(Split)
    }


def _answer_in_data(task: Task) -> Transcript | None:
    """Return the answer that the teacher `gold` writes, of an environment without a method `gold`."""
    answer = task.data.get("answer")
    return Transcript(answer) if isinstance(answer, str) else None


def environment_section(name: str, settings: list[str]) -> dict[str, Any]:
    """Return the environment section that a name and `--set` options describe.

    Raises:
        RequestError: when an option is malformed.
    """
    if is_file_reference(name):
        own = {"id": name, SOURCE: read_source_file(name, Path.cwd(), "environment")}
    else:
        identifier, _, family = name.partition("/")
        own = {"id": identifier} | ({family_field(identifier): family} if family else {})
    section = parse_settings(settings, onto=own)
    if "rewards" in section:
        section["rewards"] = load_reward_terms(section["rewards"], Path.cwd(), "--set rewards")
    return section


def parse_settings(
    settings: list[str], option: str = "--set", onto: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Parse options such as `config.max_terms=2`, with YAML values, into a section merged into `onto`.

    Raises:
        RequestError: when one is not KEY=VALUE, or its value is not YAML.
    """
    section = dict(onto or {})
    for setting in settings:
        key, equals, text = setting.partition("=")
        *parents, last = key.strip().split(".")
        if not equals or not all((*parents, last)):
            raise RequestError(f"'{setting}' is not KEY=VALUE", where=option, remedy=f"{option} KEY=VALUE")
        try:
            value = parse_yaml(text, option).value
        except RequestError as error:
            raise RequestError(f"'{setting}': {error.what}", where=option) from None
        target = section
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):
                raise RequestError(f"'{parent}' is not a section with fields", where=f"{option} {setting}")
        target[last] = value
    return section


def _indent(text: str | None) -> str:
    return "(none stated)" if text is None else text.replace("\n", "\n          ")
