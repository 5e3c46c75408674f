"""`perilune new`: write a commented recipe to start from."""

import json
import re
import sys
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from perilune.bundle.job import Preset
from perilune.cli.arguments import EnvironmentFields, require_writable
from perilune.cli.data.environments import environment_section
from perilune.cli.output import echo
from perilune.cli.train.plan import derive_plans
from perilune.data.sources import read_first_row, read_rows
from perilune.environments.core.protocol import Split
from perilune.environments.core.registry import make_environment
from perilune.errors import RequestError
from perilune.recipe.resolve import resolve
from perilune.recipe.schema import NAME_PATTERN
from perilune.recipe.source import parse_yaml

Task = Literal["sft", "rl", "preference"]

OWN_TEACHERS = ("calculator", "open_spiel", "planning", "tools")  # environments with a teacher of their name
PRESETS = get_args(Preset)

TEMPLATE = """\
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
{environment}stages:
"""
BEFORE_STAGE = """\
  # The model before training, on held-out tasks.
  - {name: before, task: evaluate, checkpoint: model, tasks: HELD_OUT, max_tokens: 256}
"""
AFTER_STAGE = """\
  # The same held-out tasks after training; the report shows the difference with its interval.
  - {name: after, task: evaluate, checkpoint: TRAINED, tasks: HELD_OUT, max_tokens: 256}
"""
STAGES: dict[str, tuple[str, str, str]] = {  # task: title, stages, the stage that trains
    "sft": (
        "supervised fine-tuning on verified answers",
        """\
  # Verified answers to imitate. To train on a model's own answers: task rejection_sampling.
  - {name: traces, task: collect, teacher: TEACHER, traces: TRACES}
  # batch_size is in traces. The default of lr depends on the model; --plan shows it.
  - {name: sft, task: sft, checkpoint: model, data: traces, steps: 100, batch_size: BATCH}
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

DEFAULT_EPOCHS = {"sft": 3, "preference": 1}
HELD_OUT_TASKS = 64
DEFAULT_ROWS = 16  # rows of a step
MAX_TRACES = 2000
NEW_MODEL_STEPS = 300  # steps of a new model, at least; it has to learn to write first
OWN_STAGES = {  # from the user's own data
    "sft": (
        "supervised fine-tuning on {data}",
        """\
  # {rows:,} rows; {steps} steps of {batch} are {epochs} epochs. Loss is on the answers alone.
  # A row that is too long is an error. too_long: drop or truncate; max_length: N lowers the limit.
  # batch_size is in rows, packed without padding. The default of lr depends on the model; --plan shows it.
  - {{name: sft, task: sft, checkpoint: model, data: {data}, steps: {steps}, batch_size: {batch}}}
""",
        "sft",
    ),
    "preference": (
        "preference learning on {data}",
        """\
  # {rows:,} pairs; {steps} steps of {batch} are {epochs} epochs. nll: 1.0 keeps the chosen answers likely.
  # A pair that is too long is an error; too_long: drop leaves it out. loss: dpo, dpo_norm or ipo.
  - {{name: dpo, task: preference, checkpoint: model, data: {data}, loss: dpo, beta: 0.1, steps: {steps},
     batch_size: {batch}}}
""",
        "dpo",
    ),
}

NEW_MODEL = {
    "sft": """\
  # A new model knows nothing, so it needs many more steps than a pretrained one.
""",
    "preference": """\
  # A new model only writes noise. Train it by sft on chosen answers first, and start this stage from there.
""",
}


def new(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="Name of the experiment and the file.")] = "",
    *,
    model: Annotated[
        str,
        typer.Option(
            help="A Hugging Face folder, the id of a cached model, or for a new model one of "
            f"{', '.join(PRESETS)}."
        ),
    ] = "",
    environment: Annotated[
        str,
        typer.Option(metavar="ID", help="Id of an environment, with its family: reasoning_gym/chain_sum."),
    ] = "",
    task: Annotated[
        Task | None, typer.Option(help=f"Kind of training: {', '.join(get_args(Task))}.", show_default=False)
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            "--from", metavar="PATH", help="Your own data for sft or preference: a file or a folder."
        ),
    ] = "",
    settings: EnvironmentFields = [],  # noqa: B006  # typer reads the default and never changes it
) -> None:
    """Write NAME.yaml, a commented recipe to start from. In a terminal, asks for missing options.

    The recipe is checked before it is written. An existing file is not replaced.

    \b
    perilune new
    perilune new mine --model Qwen/Qwen3-0.6B --environment reasoning_gym/spell_backward --task rl
    perilune new sums --model tiny --environment calculator --task sft
    perilune new chats --model Qwen/Qwen3-0.6B --from chats.jsonl
    """
    name = _ask_missing(name, "NAME", "name of the experiment", "mine").removesuffix(".yaml")
    if not re.fullmatch(NAME_PATTERN, name):
        what = f"'{name}' must begin with a letter and have at most 64 letters, digits, _ and -"
        raise RequestError(what, where="NAME", remedy="the file is written to the current folder")
    path = Path(f"{name}.yaml")
    require_writable("NAME", path, path.parent)
    if path.exists():
        raise RequestError("the file exists", where=str(path), remedy="another NAME, or remove the file")
    model = _ask_missing(
        model, "--model", f"model: a folder, a cached model id, or one of {', '.join(PRESETS)}", "tiny"
    )
    if data:
        parts = _data_parts(data, task, is_new=model in PRESETS)
    else:
        environment = _ask_missing(
            environment, "--environment", "environment (perilune environments list)", "calculator"
        )
        chosen = _ask_missing(task or "", "--task", f"task: {', '.join(get_args(Task))}", "rl")
        if chosen not in STAGES:
            raise RequestError(f"no task '{chosen}'", where="--task", remedy=f"one of: {', '.join(STAGES)}")
        parts = STAGES[chosen]
    section = environment_section(environment, settings) if environment else {}
    text = _render_recipe(name, model, section, parts)
    _check(text, path)
    path.write_text(text, encoding="utf-8")
    echo(f"wrote {path}\n  next: perilune run {path} --plan")


def _ask_missing(given: str, option: str, question: str, default: str) -> str:
    """Return the given value, else the answer to a prompt in the terminal."""
    if given:
        return given
    if not sys.stdin.isatty():
        raise RequestError(f"{option} is missing", remedy=f"{option} takes the {question}")
    return str(typer.prompt(question, default=default, err=True)).strip()


def _data_parts(path: str, task: Task | None, *, is_new: bool) -> tuple[str, str, str]:
    """Return the title, the stages and the training stage for the user's own data, from its first row."""
    guessed = "preference" if "chosen" in read_first_row(Path(path)).value else "sft"
    if task not in (None, guessed):
        raise RequestError(
            f"the rows of {path} are for task {guessed}", where="--task", remedy="leave it out"
        )
    rows = sum(1 for _ in read_rows(Path(path)))
    batch = min(DEFAULT_ROWS, rows)
    steps = max(
        ceil(DEFAULT_EPOCHS[guessed] * rows / batch), NEW_MODEL_STEPS if is_new and guessed == "sft" else 1
    )
    data = json.dumps(path if "." in path or "/" in path else f"./{path}")
    epochs = f"{steps * batch / rows:.3g}"
    values = {"data": data, "rows": rows, "batch": batch, "steps": steps, "epochs": epochs}
    title, stages, trained = OWN_STAGES[guessed]
    return title.format(**values), (NEW_MODEL[guessed] if is_new else "") + stages.format(**values), trained


def _render_recipe(name: str, model: str, environment: dict[str, Any], parts: tuple[str, str, str]) -> str:
    """Return the text of the recipe. A JSON value is also a YAML value."""
    title, stages, trained = parts
    source = f"preset: {model}  # a new model" if model in PRESETS else f"path: {json.dumps(model)}"
    rewards = environment.pop("rewards", None)
    section = "".join(f"\n  {key}: {json.dumps(value)}" for key, value in environment.items())
    section = f"environment:{section}\n" if section else ""
    if rewards:
        section += f"rewards: {json.dumps(rewards)}\n"
    body = BEFORE_STAGE + stages + AFTER_STAGE if environment else stages
    if environment:
        body = body.replace("HELD_OUT", str(_count_tasks(environment, "heldout", HELD_OUT_TASKS)))
    if "TRACES" in body:
        traces = _count_tasks(environment, "train", MAX_TRACES)
        body = body.replace("TRACES", str(traces)).replace("BATCH", str(min(2 * DEFAULT_ROWS, traces)))
    teacher = environment["id"] if environment.get("id") in OWN_TEACHERS else "gold"
    body = body.replace("TEACHER", teacher).replace("TRAINED", trained)
    return TEMPLATE.format(name=name, title=title, model=source, environment=section) + body


def _count_tasks(environment: dict[str, Any], split: Split, most: int) -> int:
    """Return the number of tasks to use: `most`, or all tasks of a small file of questions."""
    tasks = make_environment(environment).tasks(split, 0)
    return sum(1 for _ in islice(tasks, most)) or most


def _check(text: str, path: Path) -> None:
    """Raise the error that `perilune run --plan` would raise."""
    derive_plans(resolve(parse_yaml(text, str(path)), path.parent))
