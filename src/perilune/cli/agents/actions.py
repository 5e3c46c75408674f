"""The acting tools. A first call returns the plan and a token; a second call with the token acts.

A token is good for one call, for a quarter of an hour, and only for exactly what the first call described:
the resolved recipe with the code that it names, the template, and the bundles that start now.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from perilune.control.queries.forecast import forecast_submission
from perilune.control.queries.lookup import find_run_or_experiment
from perilune.control.record.store import Run
from perilune.control.record.transitions import RunState
from perilune.control.runs.current_submission import live_runs
from perilune.control.runs.experiments import Control, plan_stages
from perilune.control.runs.templates import Template
from perilune.errors import RequestError
from perilune.files import canonical_json, sha256_bytes
from perilune.recipe.schema import Recipe

TOKEN_LIFETIME_S = 900.0  # seconds for which a token is valid
MOST_TOKENS = 100

RecipeName = Annotated[
    str,
    Field(
        description="Name of a bundled recipe, or a YAML file in the recipe folder. "
        "For an unknown name, the error lists all names."
    ),
]
Overrides = Annotated[list[str], Field(description='Keys of the recipe to set: "rl.steps=10", "seed=1".')]
TemplateName = Annotated[str, Field(description="Where runs go. Default: this machine.")]
TemplateOverrides = Annotated[list[str], Field(description="Keys of the template to set.")]
Token = Annotated[str, Field(description="From the first call, after the user has agreed to what it says.")]


@dataclass
class Actor:
    """The acting tools over one home.

    Args:
        recipes: folder of the recipes that may be run, besides the bundled ones.
    """

    control: Control
    recipes: Path
    _issued: dict[str, tuple[str, float]] = field(default_factory=dict)

    @property
    def tools(self) -> tuple[Callable[..., dict[str, Any]], ...]:
        """The tools."""
        return self.plan, self.run, self.cancel

    def plan(
        self,
        recipe: RecipeName,
        overrides: Overrides = [],  # noqa: B006  # never changed
        template: TemplateName = "",
        template_overrides: TemplateOverrides = [],  # noqa: B006
    ) -> dict[str, Any]:
        """Plan a recipe: its stages, where they run, and the expected `time` and cost. Starts nothing.

        Returns a `token` with which `run` starts exactly this.

        `forecast.stages` has the `action` of each stage: "reuse" a finished run, which costs nothing; "join"
        a live run; "begin" now; or "later", when the stages in `after` have ended. `other_code` is a finished
        run with the same settings that is not reused, because the code has changed since. `forecast.cost`
        has upper bounds in the provider's currency: `attempt` for one attempt on one machine, `stages` for
        all remaining stages without retries, `retried` with every retry. A machine is only rented while its
        bound fits into `left`, the rest of `daily_cap`.
        """
        *_, document = self._plan(recipe, overrides, template, template_overrides, check=True)
        return {"token": self._issue_token(_plan_digest(document)), **document}

    def run(
        self,
        recipe: RecipeName,
        overrides: Overrides = [],  # noqa: B006
        template: TemplateName = "",
        template_overrides: TemplateOverrides = [],  # noqa: B006
        token: Token = "",
    ) -> dict[str, Any]:
        """Start a recipe in the background. Without `token`: the plan and a token, and nothing starts."""
        from perilune.cli.train.run import start_detached

        if not token:
            return self.plan(recipe, overrides, template, template_overrides)
        loaded, target, document = self._plan(recipe, overrides, template, template_overrides, check=False)
        self._redeem_token(token, _plan_digest(document), "the recipe, its inputs or the template")
        started, first = start_detached(self.control, loaded, overrides, target)
        return started if first else {**started, "note": "every stage finished before; nothing was started"}

    def cancel(
        self, target: Annotated[str, Field(description="A run or an experiment.")], token: Token = ""
    ) -> dict[str, Any]:
        """Stop a run or an experiment. Without `token`: what would stop and a token, and nothing stops."""
        from perilune.cli.arguments import summarize_run
        from perilune.cli.train.lifecycle import stop_target, stopped_document

        found = find_run_or_experiment(self.control, target)
        with self.control.store.snapshot() as session:
            live = [found] if isinstance(found, Run) else live_runs(session, found.id)
            stopping = [summarize_run(run) for run in live if not RunState(run.state).is_terminal]
        if not stopping:
            raise RequestError("no run is running", where=target)
        digest = sha256_bytes(canonical_json({"cancel": found.id, "runs": stopping}))
        if not token:
            return {"would_stop": stopping, "token": self._issue_token(digest)}
        self._redeem_token(token, digest, "what would be stopped")
        return stopped_document(found, stop_target(self.control, found))

    def _plan(
        self, name: str, overrides: list[str], template: str, changes: list[str], *, check: bool
    ) -> tuple[Recipe, Template | None, dict[str, Any]]:
        from perilune.cli.train.plan import derive_plans
        from perilune.cli.train.run import add_estimates, parse_destination, plan_document
        from perilune.recipe.load import load_recipe

        target, _ = parse_destination(template or None, changes)
        recipe = load_recipe(self._allowed_recipe(name), overrides)
        derived = derive_plans(recipe, target, check=check)
        estimated = add_estimates(self.control, recipe, target, derived)
        forecast = forecast_submission(self.control, plan_stages(recipe, target), target)
        return recipe, target, plan_document(recipe, derived, target, estimated, forecast)

    def _allowed_recipe(self, name: str) -> str | Path:
        """Return the recipe to load: a bundled one, or a YAML file in the folder of recipes."""
        from perilune.recipe.load import bundled_recipe, bundled_recipes

        if name in bundled_recipes():
            return bundled_recipe(name)
        folder = self.recipes.resolve()
        path = _find_recipe(folder, name)
        if path is None:
            names = sorted(file.name for file in folder.glob("*.y*ml") if _find_recipe(folder, file.name))
            raise RequestError(
                f"no recipe '{name}' in {folder}", remedy=f"one of: {', '.join((*names, *bundled_recipes()))}"
            )
        return path

    def _issue_token(self, digest: str) -> str:
        token = secrets.token_urlsafe(9)
        while len(self._issued) >= MOST_TOKENS:
            del self._issued[next(iter(self._issued))]
        self._issued[token] = digest, time.monotonic() + TOKEN_LIFETIME_S
        return token

    def _redeem_token(self, token: str, digest: str, what: str) -> None:
        promised, until = self._issued.pop(token, ("", 0.0))
        problem = "" if promised == digest else f"{what} changed after the token was given"
        if time.monotonic() > until:
            problem = "the token is unknown, used or expired"
        if problem:
            remedy = "call again without a token, and show the user what the new answer says"
            raise RequestError(problem, where="token", remedy=remedy)


def _find_recipe(folder: Path, name: str) -> Path | None:
    """Return the YAML file of that name, or None if there is none in the folder, which is resolved."""
    try:
        path = (folder / name).resolve(strict=True)
    except (OSError, ValueError):  # missing, too long, or with a null character
        return None
    is_recipe = path.suffix in {".yaml", ".yml"} and path.is_relative_to(folder) and path.is_file()
    return path if is_recipe else None


def _plan_digest(document: dict[str, Any]) -> str:
    """Return the digest of a plan: its recipe, its template, and the bundles that are known."""
    stages = [(stage["name"], stage["digest"]) for stage in document["forecast"]["stages"]]
    return sha256_bytes(
        canonical_json({"recipe": document["recipe"], "template": document["template"], "stages": stages})
    )
