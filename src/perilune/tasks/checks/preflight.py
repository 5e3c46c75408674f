"""The preflight: checks before the first step of an attempt.

On a scaled-down copy of the policy, gradients are compared with an independent computation, and token weights
are checked. Before a run of at least 20 steps, the algorithm must also solve a bandit, and the reward is
audited.
"""

import torch

from perilune.bundle.workspace import Workspace
from perilune.models.config.decoder_config import DecoderConfig
from perilune.tasks.checks.advantages import check_advantages
from perilune.tasks.checks.bandit import solve_bandit
from perilune.tasks.checks.gradient import check_gradient
from perilune.tasks.checks.reward import check_reward
from perilune.tasks.checks.twin import Twin
from perilune.tasks.rl.spec import RLSpec
from perilune.watchdog import Watchdog

MIN_LONG_RUN_STEPS = 20  # steps from which a run begins with a bandit and an audit


def run_preflight(
    workspace: Workspace, spec: RLSpec, config: DecoderConfig, device: torch.device, completed_steps: int
) -> None:
    """Check gradients and advantages; before a long run, solve a bandit and audit the reward.

    Args:
        config: the policy's configuration.
        completed_steps: number of steps of earlier attempts; a resumed run skips the bandit.

    Raises:
        WorkFailedError: see `check_gradient`, `check_advantages` and `solve_bandit`.
    """
    if not workspace.leads:
        return
    with Watchdog("preflight"):
        twin = Twin(spec, config, device)
        check_gradient(twin)
        check_advantages(twin)
        if completed_steps == 0 and spec.steps >= MIN_LONG_RUN_STEPS:
            workspace.log(solve_bandit(spec, device))
    if spec.steps >= MIN_LONG_RUN_STEPS:
        check_reward(workspace)
