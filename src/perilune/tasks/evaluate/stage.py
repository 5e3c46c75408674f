"""evaluate: pass@k of a checkpoint on held-out tasks, with intervals."""

from collections.abc import Mapping

from perilune.bundle.job import Job
from perilune.plural import plural
from perilune.tasks.evaluate.spec import EvaluateSpec
from perilune.tasks.stage.custom_metrics import CustomMetrics
from perilune.tasks.stage.memory_plan import model_config, plan_sampling_memory, planned_episode_tokens
from perilune.tasks.stage.sampling import ServerSpec, check_server
from perilune.tasks.stage.stage import Stage


class Evaluate(Stage[EvaluateSpec]):
    """Evaluates a checkpoint on held-out tasks, which are the same for all checkpoints of a recipe."""

    name = "evaluate"
    spec = EvaluateSpec
    loop = "perilune.tasks.evaluate.evaluation"
    produces = "evaluation"
    output = "artifacts/summary.json"

    def describe(self, spec: EvaluateSpec, job: Job) -> Mapping[str, object]:
        CustomMetrics(spec.metrics)  # refuses functions that cannot be loaded
        server = spec.engine if isinstance(spec.engine, ServerSpec) else None
        config = None if server else model_config(job)
        longest = planned_episode_tokens(job.environment, spec.max_tokens, config)
        if server is not None:
            check_server(server, job)
            needs: dict[str, object] = {"engine": server.url}
        else:
            answers = spec.tasks * spec.samples
            needs = {"memory": plan_sampling_memory(job, spec.max_tokens, answers, spec.precision)}
        return {
            "answers": f"{plural(spec.tasks, 'held-out task')} x"
            f" ({plural(spec.samples, 'sample')} + 1 greedy) = {spec.tasks * (spec.samples + 1):,}",
            "tokens at most": f"{spec.tasks * (spec.samples + 1) * longest:,}",
            **needs,
        }


plugin = Evaluate()
