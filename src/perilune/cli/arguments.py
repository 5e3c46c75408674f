"""Arguments that commands share, and functions that open the state of a home."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from importlib.util import find_spec
from inspect import Parameter, Signature, signature
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_origin, get_type_hints

import typer

from perilune.cli.groups import CommandGroup
from perilune.cli.output import echo, reserve_stdout
from perilune.errors import PeriluneError, RequestError, UnknownNameError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from perilune.control.record.store import Run
    from perilune.control.runs.experiments import Control

MAX_COMPLETED_EXPERIMENTS = 5  # experiments whose runs the shell completes
RUN_HELP = (
    "A run: its id, the first characters of its id, EXPERIMENT/STAGE, or a stage of the latest experiment."
)

WHERE_HELP = (
    "Names: reward, truncated, failure, finish_reason, step, tokens, sampled, text, environment, task_id, "
    "episode_id, reward_terms.NAME, metrics.NAME. Signs: < <= > >= == != and ~ for contains."
)


def read_token(name: str) -> str | None:
    """Return the bearer token in the secret `name`; None without a name. Output then never shows it.

    Raises:
        RequestError: when the secret has no value here.
    """
    from perilune.bundle.secret_sources import secret_value

    token = secret_value(name) if name else None
    if name and token is None:
        raise RequestError(
            f"{name} is not set",
            where="--token-env",
            remedy=f"export {name}, or configure its source: perilune secrets set {name}",
        )
    return token


def complete_run_names(incomplete: str) -> list[tuple[str, str]]:
    """Return shell completions: stages of the latest experiment, EXPERIMENT/STAGE, and run ids."""
    from perilune.control.queries.lookup import latest_experiments, stage_statuses

    control = open_control(refresh=False)
    latest = latest_experiments(control, MAX_COMPLETED_EXPERIMENTS)
    stages = [stage for stage in stage_statuses(control, latest) if stage.run_id]
    names = [(stage.name, stage.state) for stage in stages if stage.experiment_id == latest[0]]
    names += [(f"{stage.experiment}/{stage.name}", stage.state) for stage in stages]
    names += [(stage.run_id, f"{stage.experiment}/{stage.name}, {stage.state}") for stage in stages]
    return [(name, description) for name, description in names if name.startswith(incomplete)]


RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help=RUN_HELP, autocompletion=complete_run_names, show_default=False)
]
RunOrExperiment = Annotated[
    str,
    typer.Argument(
        metavar="RUN|EXPERIMENT",
        help=f"{RUN_HELP} Or an experiment: its name, or the first characters of its id.",
        autocompletion=complete_run_names,
        show_default=False,
    ),
]
ServerToken = Annotated[
    str,
    typer.Option(
        "--token-env",
        metavar="NAME",
        help="Name of the secret with the server's bearer token: an environment variable, or a name that "
        "`perilune secrets list` shows.",
    ),
]
CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A Hugging Face folder, a GGUF file, a model from `perilune model fetch`, or a run that "
        "wrote a checkpoint: its id, or EXPERIMENT/STAGE.",
        autocompletion=complete_run_names,
        show_default=False,
    ),
]
RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a bundled recipe.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the recipe: rl.steps=10. Repeatable."),
]
Json = Annotated[bool, typer.Option("--json", callback=reserve_stdout, help="Print one JSON document.")]
EnvironmentFields = Annotated[
    list[str],
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Set a field of the environment: config.max_terms=2. Repeatable."
    ),
]

SplitOption = Annotated[
    Literal["train", "heldout"], typer.Option("--split", help="Split of the tasks: train or heldout.")
]
AnswerTokens = Annotated[
    int | None,
    typer.Option(
        min=1, help="Maximum length of an answer in tokens. Default: 64, or 256 for a pretrained model."
    ),
]
EvaluationSeed = Annotated[int, typer.Option(min=0, help="Seed that selects the tasks and the samples.")]


def check_output_folder(param: typer.CallbackParam, path: Path | None) -> Path | None:
    """Refuse a folder that cannot be written, before the work of the command starts. Creates nothing."""
    if path is not None:
        require_writable(_name_parameter(param), path, path)
    return path


def check_output_file(param: typer.CallbackParam, path: Path | None) -> Path | None:
    """Refuse a file that cannot be written, before the work of the command starts. Creates nothing."""
    if path is not None:
        where = _name_parameter(param)
        require_writable(where, path, path.parent)
        if path.exists() and not path.is_file():
            raise RequestError(f"{path} is no regular file", where=where, remedy="name another file")
    return path


def _name_parameter(param: typer.CallbackParam) -> str:
    """Return the name of an option or of an argument as the help shows it."""
    return param.opts[0] if param.param_type_name == "option" else str(param.metavar)


def require_writable(where: str, path: Path, folder: Path) -> None:
    """Make a nameless file in `folder`, or in the nearest parent that exists.

    Raises:
        RequestError: when that fails. Its message names the option or argument `where`, and `path`.
    """
    try:
        nearest = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        with TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise RequestError(
            f"cannot write {path}: {error.strerror}",
            where=where,
            remedy="name a path below a folder in which you may create files",
        ) from None


def require_packages(extra: str, *packages: str) -> None:
    """Refuse a command whose packages, those of an extra, are not installed."""
    if missing := [package for package in packages if find_spec(package) is None]:
        remedy = f"pip install 'perilune[{extra}]'"
        raise RequestError(f"the package {missing[0]} is not installed", remedy=remedy)


def open_run(reference: str) -> tuple[Control, Run]:
    """Open the control plane of this home, check the state of live runs, and find a run."""
    from perilune.control.queries.lookup import find_run

    control = open_control()
    return control, find_run(control, reference)


def make_command_group(help: str) -> typer.Typer:
    """Make a command whose module adds subcommands."""
    group = typer.Typer(
        cls=CommandGroup,
        help=help,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    group.callback(help=help)(lambda: None)  # otherwise typer merges a group with one subcommand into it
    return group


def open_control(*, refresh: bool = True) -> Control:
    """Open the control plane of this home. With `refresh`, first check the state of live runs."""
    from perilune.control.runs.experiments import Control

    control = Control()
    if refresh:
        refresh_state(control)
    return control


def refresh_state(control: Control) -> None:
    """Check the state of live runs for a few seconds; warn on stderr about those that do not answer."""
    if doubt := try_refresh(control):
        echo(f"warning: {doubt}", err=True)


def try_refresh(control: Control) -> str:
    """Check the state of live runs for a few seconds; returns a warning if some state may be old, else ""."""
    from perilune.control.queries.quick_refresh import quick_refresh

    try:
        silent = quick_refresh(control.reconciler)
    except PeriluneError as error:  # the state cannot be recorded now, but it can be shown
        return f"showing the last known state: {error}"
    if not silent:
        return ""
    names = ", ".join(f"{run.stage} ({run.id})" for run in silent[:3])
    more = f" and {len(silent) - 3} more" if len(silent) > 3 else ""
    return (
        f"no answer from {names}{more}; showing the last known state."
        " `perilune reconcile` waits for an answer"
    )


def summarize_run(run: Run) -> dict[str, Any]:
    """Return the fields of a run that commands print as JSON."""
    names = ("stage", "state", "cause", "message", "retry_of")
    fields = {name: getattr(run, name) for name in names}
    return {"run": run.id, **fields, "attempts": run.current_epoch}


def format_reason(fields: dict[str, Any]) -> str:
    """Format the cause of a state in parentheses on one line; "" without a cause."""
    first = fields["message"].partition("\n")[0]
    return f" ({fields['cause']}: {first})" if fields["cause"] else ""


def find_bundle(target: str) -> Path:
    """Find a bundle by its path, or as the folder of the latest attempt of a run."""
    path = Path(target).expanduser()
    if path.exists() or target.startswith((".", "/")):
        return path
    from perilune.control.queries.lookup import find_run
    from perilune.control.runs.experiments import Control

    control = Control()
    return control.existing_directory(find_run(control, target))


def add_options(settings: type[DataclassInstance]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the annotated fields of a dataclass as options to a command with `**options`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters = signature(command, eval_str=True).parameters.values()
        own = [parameter for parameter in parameters if parameter.kind is not Parameter.VAR_KEYWORD]
        hints = get_type_hints(settings, include_extras=True)
        options = [
            Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name])
            for field in fields(settings)
            if get_origin(hints[field.name]) is Annotated
        ]
        command.__signature__ = Signature([*own, *options])  # type: ignore[attr-defined]
        return command

    return decorate


def find_checkpoint(checkpoint: str) -> Path:
    """Find the folder of a checkpoint by its path, its name in the home or its run.

    Raises:
        RequestError: when `checkpoint` is none of these, or the run has no checkpoint.
    """
    from perilune.models.fetch import PACKAGED
    from perilune.models.store import find_stored_model, resolve_model_folder

    path = Path(checkpoint).expanduser()
    if path.is_dir() or checkpoint.startswith((".", "/", "~")) or path.suffix == ".gguf":
        return resolve_model_folder(path)
    if (stored := find_stored_model(checkpoint)) is not None:
        return stored.folder
    if checkpoint in PACKAGED:
        raise RequestError(
            f"the model {checkpoint} is not in this home", remedy=f"perilune model fetch {checkpoint}"
        )
    from perilune.bundle.plugin import load_plugin
    from perilune.control.queries.lookup import find_run, stage_statuses
    from perilune.control.runs.experiments import Control

    control = Control()
    try:
        run = find_run(control, checkpoint)
    except UnknownNameError as error:
        resolve_model_folder(path)  # refuses a file
        what = f"{error.what}, and there is no folder or fetched model {checkpoint}"
        raise RequestError(what, remedy=error.remedy) from None
    plugin = load_plugin(run.task)
    if plugin.produces != "checkpoint":
        stages = stage_statuses(control, [run.experiment_id])
        begun = [stage for stage in stages if stage.run_id]
        fitting = [stage for stage in begun if load_plugin(stage.task).produces == "checkpoint"]
        names = ", ".join(f"{stage.experiment}/{stage.name}" for stage in fitting)
        remedy = f"a stage that makes one: {names}" if names else "name a run that makes one: perilune runs"
        raise RequestError(f"a run of {run.task} makes no checkpoint", where=checkpoint, remedy=remedy)
    folder = control.existing_directory(run) / plugin.output
    if not folder.is_dir():
        raise RequestError(
            f"the run is {run.state} and has no final checkpoint",
            where=checkpoint,
            remedy=f"perilune explain {run.id}",
        )
    return folder
