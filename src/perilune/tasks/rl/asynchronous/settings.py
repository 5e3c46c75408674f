"""The settings of asynchronous training."""

from pydantic import Field

from perilune.frozen import Frozen
from perilune.learn.off_policy import OffPolicySettings
from perilune.learn.training_settings import LearnerSettings
from perilune.weights import SendMode


class RaySettings(Frozen):
    """A Ray cluster whose nodes run the rollout processes."""

    address: str = Field(
        "auto", description="HOST:PORT of the cluster's head; auto finds the cluster of this machine"
    )
    cpus: float = Field(1, ge=0, description="CPUs that Ray reserves for each rollout process")
    gpus: float = Field(0, ge=0, description="GPUs that Ray reserves for each rollout process")


class AsynchronousSettings(Frozen):
    """How far rollouts may run ahead of training, and in which processes they run."""

    staleness: int = Field(
        1,
        ge=0,
        description="maximum number of steps by which rollouts run ahead of training; 0: rollouts wait"
        " for each update",
    )
    workers: int = Field(1, ge=1, description="rollout processes; each has an engine of its own")
    environments: int = Field(
        4,
        ge=1,
        description="environment processes of each rollout process; a slow tool delays only its own process",
    )
    ray: RaySettings | None = Field(
        None, description="run the rollout processes on the nodes of a Ray cluster; {} uses the defaults"
    )
    weights: SendMode = Field(
        "auto",
        description="how new weights are sent. full: as whole tensors; delta: as changed values, where"
        " these take fewer bytes than the tensor; auto: like delta for tensors that engines"
        " keep in bfloat16, like full for others",
    )
    keep_sent: bool = Field(
        True,
        description="how to find the changed values. true: compare with a copy of the weights that were"
        " sent last; false: recompute those weights by reversing the optimizer's update, which"
        " takes longer and needs no copy",
    )

    def keeps_weights_copy(self, learner: LearnerSettings) -> bool:
        """Return whether the learner keeps a bfloat16 copy of its weights to find those that changed."""
        narrow = learner.precision == "bfloat16" and learner.lora is None
        return self.keep_sent and self.weights != "full" and narrow

    def describe(self) -> str:
        processes = "1 rollout process" if self.workers == 1 else f"{self.workers} rollout processes"
        cluster = "" if self.ray is None else f" on the Ray cluster {self.ray.address}"
        environments = f"with {self.environments} environments each"
        return f"up to {self.staleness} steps ahead, {processes}{cluster} {environments}"


def default_corrections(settings: AsynchronousSettings, updates: int) -> OffPolicySettings:
    """Return the default off-policy corrections: truncated importance weights, and a mask on very old tokens.

    The admission limit bounds the mean age of tokens, but not the age of the first tokens of long episodes.

    Args:
        updates: optimizer updates in each step.
    """
    oldest = updates * 4 * (settings.staleness + 1)
    return OffPolicySettings(proximal="learner", weight="truncate", max_staleness=oldest)
