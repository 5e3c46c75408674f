"""What every task that touches a model starts with: device, threads, weights, environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import islice

import torch

from perilune.bundle.workspace import Workspace
from perilune.environments.core.protocol import Environment, Task
from perilune.errors import RequestError
from perilune.learn.adaptation import adapt
from perilune.learn.distributed import Ranks, join
from perilune.learn.training_settings import LearnerSettings
from perilune.models.adapters.lora import BaseKind, base_of, narrow_base
from perilune.models.checkpoints.loading import load_checkpoint, new_model
from perilune.models.checkpoints.stored import open_checkpoint
from perilune.models.decoder import Decoder
from perilune.models.native.build import missing_kernels, native
from perilune.models.text.tokenizer import Tokenizer

MODEL = "model"  # the input that holds the weights the recipe's model section names


@dataclass(frozen=True)
class Policy:
    """A model ready to sample and to learn."""

    decoder: Decoder
    tokenizer: Tokenizer

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sample: those the model names, the tokenizer's end-of-sequence among them.

        A token outside the vocabulary is never sampled, and is left out.
        """
        config = self.decoder.config
        return tuple(token for token in config.eos_token_ids if token < config.vocab_size)


def prepare_device(workspace: Workspace) -> torch.device:
    """Fix the number of threads and choose the device the job asks for.

    Raises:
        RequestError: when CUDA is asked for and not there.
    """
    resources = workspace.job.resources
    if resources.threads:
        torch.set_num_threads(resources.threads)
    if resources.device == "cuda" and not torch.cuda.is_available():
        raise RequestError("device cuda is asked for and this machine has none", remedy="perilune doctor")
    wanted: str = resources.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(workspace.job.seed)
    workspace.log(f"device {wanted}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    if wanted == "cpu" and (kernels := native()).library is None:
        workspace.log(missing_kernels(kernels.reason))
        workspace.event("kernels_missing", reason=kernels.reason)
    if wanted == "cuda" and "LOCAL_RANK" in os.environ:  # each of several processes has a device to itself
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        return device
    return torch.device(wanted)


def join_ranks(workspace: Workspace, device: torch.device) -> Ranks:
    """Meet the other processes of the stage, where it runs in several."""
    ranks = join(device, workspace.job.resources.sharded)
    if ranks.count > 1:
        kept = "cut over all" if ranks.sharded else "whole in each"
        workspace.log(f"process {ranks.rank} of {ranks.count}, what is trained {kept}")
    return ranks


def load_policy(
    workspace: Workspace,
    device: torch.device,
    settings: LearnerSettings | None = None,
    *,
    only_samples: bool = False,
) -> Policy:
    """The checkpoint that the stage consumes; else the recipe's own model.

    Args:
        settings: how it is to learn, where it is.
        only_samples: whether an engine alone will have its weights.
    """
    base: BaseKind = settings.lora.base if settings and settings.lora else "float32"
    if workspace.has_input("checkpoint") and only_samples:
        policy = Policy(*open_checkpoint(workspace.input("checkpoint"), device))
    elif workspace.has_input("checkpoint"):
        policy = Policy(*load_checkpoint(workspace.input("checkpoint"), device, base=base))
    else:
        policy = start_model(workspace, device, base)
    if settings is not None:
        adapt(policy.decoder, settings, workspace.job.seed)
    return policy


def load_reference(
    workspace: Workspace, device: torch.device, policy: Policy, settings: LearnerSettings
) -> Decoder:
    """The policy that training begins with, computed as `policy` is: its base, or the same loaded again."""
    if settings.lora is not None:
        return base_of(policy.decoder)
    return load_policy(workspace, device, settings).decoder


def start_model(workspace: Workspace, device: torch.device, base: BaseKind = "float32") -> Policy:
    """The recipe's model section: the staged Hugging Face folder, or a fresh preset from the seed.

    Args:
        base: how matrices are kept, for a model that is to be frozen.
    """
    model = workspace.job.model
    if workspace.has_input(MODEL):
        decoder, tokenizer = load_checkpoint(workspace.input(MODEL), device, base=base)
    else:
        tokenizer = Tokenizer.characters()
        decoder = new_model(model["preset"], tokenizer, workspace.job.seed).to(device)
        narrow_base(decoder, base)
    if model.get("chat_template"):
        tokenizer = tokenizer.with_chat_template(model["chat_template"], where="model.chat_template")
    # A base model may name another end than its tokenizer, whose token training ends every answer with.
    ends = dict.fromkeys((*decoder.config.eos_token_ids, tokenizer.eos_token_id))
    decoder.config = decoder.config.replace(eos_token_ids=tuple(ends))
    return Policy(decoder, tokenizer)


def heldout_tasks(environment: Environment, count: int, seed: int) -> list[Task]:
    """The first `count` held-out tasks: the same for everything that is judged with this seed.

    Raises:
        RequestError: when the environment has fewer. None is asked twice: a figure over repeated tasks would
            claim more certainty than there is.
    """
    tasks = list(islice(environment.tasks("heldout", seed), count))
    if len(tasks) < count:
        raise RequestError(
            f"{environment.id} gave {len(tasks)} of {count} held-out tasks",
            remedy="ask for fewer, or widen its config",
        )
    return tasks
