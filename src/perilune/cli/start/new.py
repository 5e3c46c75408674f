"""`perilune new`: write a commented recipe to start from."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from perilune.cli.arguments import EnvironmentFields
from perilune.cli.data.environments import section_of
from perilune.cli.output import echo
from perilune.errors import RequestError

Task = Literal["sft", "rl", "preference"]

TEACHERS = {"calculator": "calculator", "open_spiel": "open_spiel", "planning": "planning", "tools": "tools"}
PRESETS = ("tiny", "small")

HEAD = """\
# {name}: {title}.
#
#   perilune run {name}.yaml --plan    show what each stage does, with memory and token counts
#   perilune run {name}.yaml           run it; the same command resumes it
#
# `perilune environments show ID` lists the fields of an environment. All keys: docs/reference/recipe.md
name: {name}
seed: 0  # every random number derives from it
model:
  {model}
environment:{environment}
stages:
"""
BEFORE = """\
  # The model before training, on held-out tasks.
  - {name: before, task: evaluate, checkpoint: model, tasks: 64, max_tokens: 256}
"""
AFTER = """\
  # The same held-out tasks after training; the report shows the difference with its interval.
  - {name: after, task: evaluate, checkpoint: TRAINED, tasks: 64, max_tokens: 256}
"""
STAGES: dict[str, tuple[str, str, str]] = {  # task: title, stages, the stage that trains
    "sft": (
        "supervised fine-tuning on verified answers",
        """\
  # Verified answers to imitate. To train on a model's own answers: task rejection_sampling.
  - {name: traces, task: collect, teacher: TEACHER, traces: 2000}
  # batch_size is in traces. The default of lr depends on the model; --plan shows it.
  - {name: sft, task: sft, checkpoint: model, data: traces, steps: 100, batch_size: 32}
""",
        "sft",
    ),
    "rl": (
        "reinforcement learning from the verifier's reward",
        """\
  # Each step samples 8 answers to each of 8 prompts. kl: 0.01 keeps the policy near its start.
  - {name: rl, task: rl, checkpoint: model, steps: 50, prompts: 8, samples: 8, max_tokens: 256}
""",
        "rl",
    ),
    "preference": (
        "preference learning on pairs that the verifier ranks",
        """\
  # Pairs of a right and a wrong answer of the model to the same task.
  - {name: pairs, task: pairs, checkpoint: model, tasks: 256, samples: 8, max_tokens: 256}
  # nll keeps the chosen answers likely. loss: dpo, dpo_norm or ipo.
  - {name: dpo, task: preference, checkpoint: model, data: pairs, loss: dpo, beta: 0.1, nll: 1.0, steps: 50}
""",
        "dpo",
    ),
}


def new(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="Name of the experiment and the file.")] = "",
    *,
    model: Annotated[
        str,
        typer.Option(help="A Hugging Face folder or a cached model id; tiny or small for a new model."),
    ] = "",
    environment: Annotated[
        str, typer.Option(metavar="ID", help="An environment, with its family: reasoning_gym/chain_sum.")
    ] = "",
    task: Annotated[Task | None, typer.Option(help="How to train.", show_default=False)] = None,
    settings: EnvironmentFields = [],  # noqa: B006  # typer reads the default and never changes it
) -> None:
    """Write NAME.yaml, a commented recipe to start from. In a terminal, asks for missing options.

    The recipe is checked before it is written. An existing file is not replaced.

    \b
    perilune new
    perilune new mine --model Qwen/Qwen3-0.6B --environment reasoning_gym/spell_backward --task rl
    perilune new sums --model tiny --environment calculator --task sft
    """
    name = _asked(name, "NAME", "name of the experiment", "mine").removesuffix(".yaml")
    path = Path(f"{name}.yaml")
    if path.exists():
        raise RequestError("the file exists", where=str(path), remedy="another NAME, or remove the file")
    model = _asked(model, "--model", "model: a folder, a cached model id, tiny or small", "tiny")
    environment = _asked(
        environment, "--environment", "environment (perilune environments list)", "calculator"
    )
    chosen = _asked(task or "", "--task", f"task: {', '.join(get_args(Task))}", "rl")
    if chosen not in STAGES:
        raise RequestError(f"no task '{chosen}'", where="--task", remedy=f"one of: {', '.join(STAGES)}")
    text = _recipe(name, model, section_of(environment, settings), chosen)
    _check(text, path)
    path.write_text(text, encoding="utf-8")
    echo(f"wrote {path}\n  next: perilune run {path} --plan")


def _asked(given: str, option: str, question: str, default: str) -> str:
    """The given value, else the answer to a prompt in the terminal."""
    if given:
        return given
    if not sys.stdin.isatty():
        raise RequestError(f"{option} is missing", remedy=f"{option}: {question}")
    return str(typer.prompt(question, default=default, err=True)).strip()


def _recipe(name: str, model: str, environment: dict[str, Any], task: str) -> str:
    """The text of the recipe. A JSON value is also a YAML value."""
    title, stages, trained = STAGES[task]
    source = f"preset: {model}  # a new model" if model in PRESETS else f"path: {json.dumps(model)}"
    rewards = environment.pop("rewards", None)
    section = "".join(f"\n  {key}: {json.dumps(value)}" for key, value in environment.items())
    if rewards:
        section += f"\nrewards: {json.dumps(rewards)}"
    body = BEFORE + stages + AFTER
    body = body.replace("TEACHER", TEACHERS.get(environment["id"], "gold")).replace("TRAINED", trained)
    return HEAD.format(name=name, title=title, model=source, environment=section) + body


def _check(text: str, path: Path) -> None:
    """Raise the error that `perilune run --plan` would raise."""
    from perilune.cli.train.plan import derive
    from perilune.recipe.resolve import resolve
    from perilune.recipe.source import parse_yaml

    derive(resolve(parse_yaml(text, str(path)), path.parent))
