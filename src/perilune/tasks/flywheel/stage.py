"""flywheel: rounds of sampling, filtering, training and evaluation while the pass rate rises."""

from collections.abc import Mapping

from perilune.bundle.job import Job
from perilune.tasks.flywheel.spec import FlywheelSpec
from perilune.tasks.stage.memory_plan import CacheSettings, model_config, plan_stage_memory
from perilune.tasks.stage.stage import Stage, training_plan


class Flywheel(Stage[FlywheelSpec]):
    """Rounds of training a policy on its own right answers."""

    name = "flywheel"
    spec = FlywheelSpec
    loop = "perilune.tasks.flywheel.loop"
    produces = "checkpoint"

    def describe(self, spec: FlywheelSpec, job: Job) -> Mapping[str, object]:
        answers = spec.tasks * spec.samples
        memory = plan_stage_memory(
            model_config(job),
            samples=answers,
            max_tokens=spec.max_tokens,
            token_budget=spec.token_budget,
            cache=CacheSettings(job.resources.device, spec.precision),
            learner=spec,
        )
        return {
            "answers": f"{spec.steps} x {spec.tasks} tasks x {spec.samples} = {spec.steps * answers:,}",
            "updates": f"{spec.steps} x {spec.updates}",
            "evaluated on": f"{spec.heldout} held-out tasks before the first round and after each",
            **training_plan(spec, job, memory),
        }


plugin = Flywheel()
