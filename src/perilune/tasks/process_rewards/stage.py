"""calibrate: checks process rewards from a policy's likelihoods before training on them."""

from collections.abc import Mapping

from perilune.bundle.job import Job
from perilune.tasks.process_rewards.spec import CalibrateSpec
from perilune.tasks.stage.memory_plan import CacheSettings, model_config, plan_stage_memory
from perilune.tasks.stage.stage import Stage


class Calibrate(Stage[CalibrateSpec]):
    """Compares the process rewards of an rl stage with Monte Carlo values of the same prefixes."""

    name = "calibrate"
    spec = CalibrateSpec
    loop = "perilune.tasks.process_rewards.calibrate"
    produces = "evaluation"
    output = "artifacts/summary.json"

    def describe(self, spec: CalibrateSpec, job: Job) -> Mapping[str, object]:
        answers = spec.tasks * spec.samples
        max_prefixes = spec.process_rewards.segments.most if spec.process_rewards else 0
        memory = plan_stage_memory(
            model_config(job),
            samples=answers,
            max_tokens=spec.max_tokens,
            cache=CacheSettings(job.resources.device),
        )
        return {
            "answers": f"{spec.tasks} held-out tasks x {spec.samples} = {answers:,}",
            "continuations": f"{spec.continuations} from each of at most {max_prefixes} prefixes per answer",
            "memory": memory,
        }


plugin = Calibrate()
