"""distill: on-policy distillation; the student samples, and a teacher scores every token."""

from collections.abc import Mapping

from perilune.bundle.job import Job
from perilune.plural import plural
from perilune.tasks.distill.spec import DistillSpec
from perilune.tasks.stage.memory_plan import model_config
from perilune.tasks.stage.stage import Stage, training_plan


class Distill(Stage[DistillSpec]):
    """On-policy distillation from a teacher with the same vocabulary, or a prompted copy of the student."""

    name = "distill"
    spec = DistillSpec
    loop = "perilune.tasks.distill.loop"
    produces = "checkpoint"
    parallel = True

    def describe(self, spec: DistillSpec, job: Job) -> Mapping[str, object]:
        memory = spec.memory_plan(model_config(job), job.resources.device)
        answers = spec.steps * spec.prompts * spec.samples
        system = f", the teacher with system message {spec.system[:40]!r}" if spec.system else ""
        tasks = f"{plural(spec.steps, 'step')} x {plural(spec.prompts, 'task')}"
        return {
            "answers": f"{tasks} x {spec.samples} = {answers:,}",
            "loss": f"{spec.loss}, {spec.on_policy:.0%} of steps on-policy{system}",
            **training_plan(spec, job, memory),
        }


plugin = Distill()
