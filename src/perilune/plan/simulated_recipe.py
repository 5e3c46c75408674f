"""The scenarios of a recipe's RL stages, and the document of their simulations."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from perilune.bundle.job import Job
from perilune.bundle.machine import usable_threads
from perilune.control.runs.experiments import Control
from perilune.environments.core.registry import REWARDS
from perilune.environments.core.rewards import VERIFIER_TERM
from perilune.errors import RequestError
from perilune.metrics.training import STEP_PARTS
from perilune.models.memory import get_model_card
from perilune.models.text.template_facts import recipe_tokenizer
from perilune.models.text.tokenizer import Tokenizer
from perilune.plan.estimate import device_name, run_trials
from perilune.plan.lengths import estimate_lengths, find_finished_run
from perilune.plan.simulation_calibration import describe_device
from perilune.recipe.schema import Recipe, Stage, build_job
from perilune.simulate.asynchronous import simulate_run
from perilune.simulate.engine import SimulatedEngine, SimulatedModel
from perilune.simulate.episodes import AssumedLengths, Lengths, RecordedLengths
from perilune.simulate.hardware import ASSUMPTIONS, ComputedTimes, Machines
from perilune.simulate.run import EnvironmentTimes, RunPlan, RunResult, Scenario
from perilune.simulate.times import Calibrated, RunTimes, load_coefficients, model_digest
from perilune.tasks.checks.preflight import MIN_LONG_RUN_STEPS
from perilune.tasks.rl.asynchronous.settings import AsynchronousSettings
from perilune.tasks.rl.spec import RLSpec
from perilune.tasks.rl.update import off_policy_settings, required_signals
from perilune.tasks.stage.memory_plan import (
    CacheSettings,
    engine_size,
    planned_episode_tokens,
    section_config,
)

MAX_EPISODES = 10_000_000  # of a simulated stage; more take hours
ASSUMED_LIVE_SHARE = 0.8  # share of groups with a gradient, without any information
DEFAULT_REWARDS = {VERIFIER_TERM: 1.0}  # `rewards` that change nothing, so there is no gold score to watch


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `perilune simulate`.

    Attributes:
        machines: None is this machine.
        wait_metric: metric of recorded episodes with their waits; "" draws waits.
        settings: staleness of each simulation, None for synchronous; empty for the recipe's own.
    """

    machines: Machines | None = None
    settings: tuple[int | None, ...] = ()
    wait: float = 0.0
    wait_spread: float = 1.0
    wait_metric: str = ""
    episodes: Path | None = None
    seed: int = 0


def simulate_recipe(recipe: Recipe, options: Options) -> tuple[dict[str, Any], list[tuple[str, RunResult]]]:
    """Simulate the RL stages; returns a document, and the result for each stage and setting.

    Raises:
        RequestError: when the recipe has no RL stage, this machine is not calibrated for its model, or the
            machines are too few.
    """
    stages = [stage for stage in recipe.stages if stage.task == "rl"]
    if recipe.model is None or not stages:
        raise RequestError("the recipe has no stage with task: rl to simulate", where=recipe.name)
    simulator = _Simulator(recipe, options, recipe_tokenizer(recipe.model.model_dump()))
    rows, results = [], []
    for stage in stages:
        spec = RLSpec.model_validate(build_job(recipe, stage).spec)
        if spec.server is not None:
            raise RequestError(
                "a stage that samples from a server cannot be simulated",
                where=f"stages.{stage.name}.engine",
                remedy="remove engine, to simulate Perilune's own",
            )
        own = spec.asynchronous
        for setting in options.settings or (own.staleness if own else None,):
            row, result = simulator.stage(stage, setting)
            rows.append(row)
            results.append((f"{stage.name}, {row['setting']}", result))
    others = [stage.name for stage in recipe.stages if stage.task != "rl"]
    notes = [f"not simulated: {', '.join(others)}. perilune run --plan estimates them"] if others else []
    document = {"recipe": recipe.name, "seed": options.seed, "machines": simulator.where, "stages": rows}
    return document | {"notes": [*simulator.notes, *notes]}, results


class _Simulator:
    def __init__(self, recipe: Recipe, options: Options, tokenizer: Tokenizer) -> None:
        assert recipe.model is not None
        self.recipe, self.options, self.tokenizer = recipe, options, tokenizer
        self.config = section_config(recipe.model.model_dump())
        self.control = Control()
        self.notes: list[str] = []
        self.trials = run_trials(recipe, tokenizer, {})
        self.calibrated: Calibrated | None = None
        if (machines := options.machines) is not None:
            self.where = f"{machines.count} x {machines.name}, {ASSUMPTIONS}"
            return
        machine = describe_device(device_name(recipe.resources))
        self.calibrated = load_coefficients(
            self.control.home.root, machine, model_digest(recipe.model.model_dump())
        )
        self.where = f"calibrated on {machine}"

    def stage(self, stage: Stage, setting: int | None) -> tuple[dict[str, Any], RunResult]:
        """Simulate a stage with a staleness, None for synchronous; returns its row and its result."""
        job = build_job(self.recipe, stage)
        spec = RLSpec.model_validate(job.spec)
        if (episodes := spec.steps * spec.prompts * spec.samples) > MAX_EPISODES:
            raise RequestError(
                f"{episodes:,} episodes are too many to simulate",
                where=f"stages.{stage.name}",
                remedy=f"--set {stage.name}.steps=N; at most {MAX_EPISODES:,} episodes are simulated",
            )
        asynchronous = None
        if setting is not None:
            settings = spec.asynchronous or AsynchronousSettings()
            asynchronous = settings.model_copy(update={"staleness": setting})
        lengths = self._lengths(stage, job)
        times, plan = self._times(spec, asynchronous, lengths)
        plan = replace(plan, watched=job.environment.get(REWARDS, DEFAULT_REWARDS) != DEFAULT_REWARDS)
        cache = CacheSettings("cuda" if self.options.machines else job.resources.device, spec.precision)
        longest = planned_episode_tokens(job.environment, spec.max_tokens, self.config)
        size = engine_size(self.config, longest, cache, None if asynchronous else spec.max_samples)
        make_engine = partial(
            SimulatedEngine, SimulatedModel.from_config(self.config), times.step, token_budget=4096, **size
        )
        environment = self._environment(job)
        scenario = Scenario(plan, times, environment, lengths, make_engine, self.options.seed)
        result = simulate_run(scenario)
        return self._row(stage, setting, lengths, result), result

    def _times(
        self, spec: RLSpec, asynchronous: AsynchronousSettings | None, lengths: Lengths
    ) -> tuple[RunTimes, RunPlan]:
        evaluated = spec.eval
        exact = self.options.machines is None and self.recipe.resources.device != "cuda"
        signals = required_signals(spec, off_policy_settings(spec, exact))
        plan = RunPlan(
            spec.steps,
            spec.prompts,
            spec.samples,
            spec.updates_per_batch,
            spec.epochs_per_batch,
            len(signals) + (spec.epochs_per_batch if spec.kl else 0),
            asynchronous=asynchronous,
            checked=spec.steps >= MIN_LONG_RUN_STEPS,
            evaluations=tuple(evaluated.steps(spec.steps)) if evaluated else (),
            evaluated=(evaluated.tasks, evaluated.samples) if evaluated else (0, 0),
        )
        if self.calibrated is None:
            return self._remote_times(plan, lengths)
        # All processes share the processors of this machine.
        cores = max(1, usable_threads() // (self.recipe.resources.threads or usable_threads()))
        return self.calibrated.times, replace(plan, cores=cores)

    def _remote_times(self, plan: RunPlan, lengths: Lengths) -> tuple[RunTimes, RunPlan]:
        """Return the times on other machines, with one copy of the model for each rollout worker."""
        machines = self.options.machines
        assert machines is not None
        workers = plan.asynchronous.workers if plan.asynchronous else 0
        if machines.replicas <= workers:
            raise RequestError(
                f"{workers} rollout workers and a learner need {workers + 1} copies of the model, and"
                f" {machines.count} x {machines.name} hold {machines.replicas}",
                where="--machines",
                remedy="name more cards, or lower asynchronous.workers",
            )
        learners = machines.replicas - workers
        groups = lengths.groups(1, 8, plan.samples)
        fed = sum(len(group.prompt) * len(group.episodes) + group.fed - len(group.prompt) for group in groups)
        length = round(fed / sum(len(group.episodes) for group in groups))
        times = ComputedTimes(machines, get_model_card(self.config), length, learners)
        return times, replace(plan, ranks=learners)

    def _environment(self, job: Job) -> EnvironmentTimes:
        """Return the environment's times, measured here with the recipe's teacher if it has one."""
        if (trial := self.trials.get(job.stage)) is None:
            return EnvironmentTimes(0.0, 0.0, self.options.wait, self.options.wait_spread)
        answer, episode = (0.0, 0.0) if self.calibrated is None else self.calibrated.times.trial
        turns = 1.0 if trial.lengths is None else trial.lengths.turns
        seconds = max(0.0, trial.episode - turns * answer - episode)
        return EnvironmentTimes(trial.task, seconds, self.options.wait, self.options.wait_spread, trial.start)

    def _lengths(self, stage: Stage, job: Job) -> Lengths:
        """Return the lengths of recorded episodes if there are any, else those that `run --plan` assumes."""
        folder, basis = self.options.episodes, f"episodes in {self.options.episodes}"
        if folder is None and (run := find_finished_run(self.control, self.recipe.name, job)) is not None:
            folder, basis = run / "artifacts" / "episodes", "episodes of the last run"
        if folder is not None:
            recorded = RecordedLengths.from_folder(folder, self.options.seed, basis, self.options.wait_metric)
            if recorded is not None:
                return recorded
            if self.options.episodes is not None:
                raise RequestError(
                    "has no step-*.parquet with sampled tokens",
                    where=str(folder),
                    remedy="name a run's artifacts/episodes",
                )
        return self._assume_lengths(stage)

    def _assume_lengths(self, stage: Stage) -> Lengths:
        expected = estimate_lengths(self.control, self.recipe, self.trials, self.tokenizer)
        if stage.name not in expected:
            raise RequestError(
                "the lengths of this stage's answers are unknown",
                where=f"stages.{stage.name}",
                remedy="name the episodes of a run with --episodes FOLDER",
            )
        lengths = expected[stage.name]
        low, high = lengths.low, lengths.high
        turns = max(1.0, low.turns)
        means = {
            "prompt": low.prompt,
            "sampled": (low.sampled + high.sampled) / 2,
            "longest": high.longest,
            "turns": turns,
            "observed": max(0.0, low.fed - low.sampled) / max(1.0, turns - 1),
        }
        live = sum(lengths.live) / 2 if lengths.live[0] < 1 else ASSUMED_LIVE_SHARE
        basis = f"assumed lognormal, mean {means['sampled']:.0f} tokens; {lengths.basis}"
        return AssumedLengths(means, self.options.seed, basis, live=live, vocabulary=self.config.vocab_size)

    def _row(self, stage: Stage, setting: int | None, lengths: Lengths, result: RunResult) -> dict[str, Any]:
        machines, total = self.options.machines, sum(result.ages.values())
        sums = {
            part: sum(step.get(part, 0.0) for step in result.steps) for part in (*STEP_PARTS, "evaluation")
        }
        return {
            "stage": stage.name,
            "setting": "synchronous" if setting is None else f"staleness {setting}",
            "lengths": lengths.basis,
            "seconds": result.seconds,
            **sums,
            "idle": result.idle_shares(),
            "ages": {str(age): count / total for age, count in sorted(result.ages.items())},
            "mean_age": sum(age * count for age, count in result.ages.items()) / max(1, total),
            "peak_blocks": list(result.peak_blocks),
            "tokens": result.tokens,
            "engine_steps": result.engine_steps,
            "preemptions": result.preemptions,
            "cost": None if machines is None else machines.cost(result.seconds),
            "steps": result.steps,
        }
