"""The frozen policy of sub-agents, from the checkpoint that a stage names."""

import torch

from perilune.bundle.workspace import Workspace
from perilune.errors import RequestError
from perilune.models.checkpoints.stored import open_checkpoint
from perilune.rollout.sub_agents import SubAgents
from perilune.tasks.stage.memory_plan import make_engine
from perilune.tasks.stage.policy import Policy

CHECKPOINT_FIELD = "sub_agent_checkpoint"


def open_sub_agents(
    workspace: Workspace, policy: Policy, device: torch.device, longest: int, *, trained: bool = False
) -> SubAgents:
    """Return an engine with the weights of `sub_agent_checkpoint`, or no engine if the stage names none.

    Args:
        device: the policy's device, which its parameters do not show while they are on disk.
        longest: most tokens of an episode after its prompt.
        trained: see `SubAgents`.

    Raises:
        RequestError: when the checkpoint has another vocabulary than the policy.
    """
    if not workspace.has_input(CHECKPOINT_FIELD):
        return SubAgents(trained=trained)
    decoder, tokenizer = open_checkpoint(workspace.input(CHECKPOINT_FIELD), device)
    if not tokenizer.has_same_tokens(policy.tokenizer):
        raise RequestError(
            "the checkpoint of the sub-agents has another tokenizer than the policy",
            where=f"stages.{workspace.job.stage}.{CHECKPOINT_FIELD}",
            remedy="name a stage that trained the same model",
        )
    return SubAgents(make_engine(decoder, longest, tokenizer), trained)
