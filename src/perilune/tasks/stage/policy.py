"""Device, process group and weights of a stage that uses a model, and the held-out tasks."""

import os
from dataclasses import dataclass
from itertools import islice

import torch

from perilune.bundle.workspace import Workspace
from perilune.environments.core.protocol import Environment, Task
from perilune.errors import RequestError
from perilune.learn.adaptation import adapt
from perilune.learn.distributed import Ranks, join
from perilune.learn.training_settings import LearnerSettings, check_sharding_torch
from perilune.models.adapters.lora import BaseKind, adapter_pairs, convert_base, without_adapter
from perilune.models.checkpoints.loading import load_checkpoint, new_model
from perilune.models.checkpoints.stored import open_checkpoint
from perilune.models.decoder import Decoder
from perilune.models.native.build import missing_kernels_message, native
from perilune.models.native.ops import has_bfloat16
from perilune.models.text.template_facts import with_recipe_template
from perilune.models.text.tokenizer import Tokenizer
from perilune.tasks.stage.new_tokenizer import is_trained, new_tokenizer

MODEL_INPUT = "model"  # the input with the weights of the recipe's model section


@dataclass(frozen=True)
class Policy:
    """A model and its tokenizer."""

    decoder: Decoder
    tokenizer: Tokenizer

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sample, without those outside the vocabulary."""
        config = self.decoder.config
        return tuple(token for token in config.eos_token_ids if token < config.vocab_size)


def prepare_device(workspace: Workspace) -> torch.device:
    """Set the number of threads and the seed, and choose the device that the job requests.

    Raises:
        RequestError: when the job requests CUDA and the machine has none.
    """
    resources = workspace.job.resources
    if resources.threads:
        torch.set_num_threads(resources.threads)
    kind: str = resources.device
    if kind == "cuda" and not torch.cuda.is_available():
        raise RequestError(
            "the recipe requests device cuda, and this machine has none",
            remedy="run `perilune doctor` to see why, or set resources.device: cpu",
        )
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(workspace.job.seed)
    if kind == "cuda":  # checks rely on float32 products, and TensorFloat-32 has a mantissa of 10 bits
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
    workspace.log(f"device {kind}, CPU threads {torch.get_num_threads()}, torch {torch.__version__}")
    if kind == "cpu" and (kernels := native()).library is None:
        workspace.log(missing_kernels_message(kernels.reason))
        workspace.event("kernels_missing", reason=kernels.reason)
    if kind == "cuda" and "LOCAL_RANK" in os.environ:  # each process has its own device
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        return device
    return torch.device(kind)


def join_ranks(workspace: Workspace, device: torch.device, decoder: Decoder) -> Ranks:
    """Join the process group of the stage, if it runs in several processes.

    By default, processes on GPUs shard the trained parameters, except for an adapter or a mixture of experts.

    Raises:
        RequestError: when the installed torch cannot shard.
        ProcessLostError: when the other processes do not connect.
    """
    sharded = workspace.job.resources.sharded
    if sharded is None and (adapter_pairs(decoder) or decoder.config.experts is not None):
        sharded = False
    ranks = join(device, sharded)
    if ranks.sharded:
        check_sharding_torch()
    if ranks.count > 1:
        layout = "sharded over all processes" if ranks.sharded else "replicated in each process"
        workspace.log(f"process {ranks.rank} of {ranks.count}, trained parameters {layout}")
    return ranks


def load_policy(
    workspace: Workspace,
    device: torch.device,
    settings: LearnerSettings | None = None,
    *,
    sampling_only: bool = False,
) -> Policy:
    """Load the stage's checkpoint, or the recipe's model if the stage has no checkpoint.

    Args:
        settings: training settings, for a policy that is trained.
        sampling_only: whether only an engine uses the weights, which can then stay on disk.
    """
    base: BaseKind = settings.lora.base if settings and settings.lora else "float32"
    if workspace.has_input("checkpoint") and sampling_only:
        policy = Policy(*open_checkpoint(workspace.input("checkpoint"), device))
    elif workspace.has_input("checkpoint"):
        policy = Policy(*load_checkpoint(workspace.input("checkpoint"), device, base=base))
    else:
        policy = load_recipe_model(workspace, device, base)
    if settings is not None:
        adapt(policy.decoder, settings, workspace.job.seed)
        if settings.precision == "bfloat16" and device.type == "cpu" and not has_bfloat16():
            workspace.log(
                "precision: bfloat16 is not faster here: the processor has neither AVX512-BF16 nor AMX"
            )
    return policy


def load_reference(
    workspace: Workspace, device: torch.device, policy: Policy, settings: LearnerSettings
) -> Decoder:
    """Return the policy before training: the base of an adapter, else a second copy of the policy."""
    if settings.lora is not None:
        return without_adapter(policy.decoder)
    return load_policy(workspace, device, settings).decoder


def load_recipe_model(workspace: Workspace, device: torch.device, base: BaseKind = "float32") -> Policy:
    """Return the model of the recipe's `model` section: a Hugging Face folder, or a new preset from the seed.

    Args:
        base: storage type of the frozen matrices under an adapter.
    """
    model = workspace.job.model
    if workspace.has_input(MODEL_INPUT):
        decoder, tokenizer = load_checkpoint(workspace.input(MODEL_INPUT), device, base=base)
    else:
        tokenizer = new_tokenizer(model, workspace.input("data") if workspace.has_input("data") else None)
        if is_trained(model):
            workspace.log(
                f"tokenizer: bpe, {tokenizer.vocab_size:,} tokens, trained on the data of this stage"
            )
        decoder = new_model(model["preset"], tokenizer, workspace.job.seed).to(device)
        convert_base(decoder, base)
    tokenizer = with_recipe_template(tokenizer, model)
    # A base model's configuration may lack the tokenizer's end token, which ends all answers in training.
    ends = dict.fromkeys((*decoder.config.eos_token_ids, tokenizer.eos_token_id))
    decoder.config = decoder.config.replace(eos_token_ids=tuple(ends))
    return Policy(decoder, tokenizer)


def heldout_tasks(environment: Environment, count: int, seed: int) -> list[Task]:
    """Return the first `count` held-out tasks, which depend on the environment and the seed alone.

    Raises:
        RequestError: when the environment has fewer. Tasks are not repeated, because intervals would then be
            too narrow.
    """
    tasks = list(islice(environment.tasks("heldout", seed), count))
    if len(tasks) < count:
        message = f"{environment.id} gave {len(tasks)} of {count} held-out tasks"
        raise RequestError(message, remedy="lower the number of tasks, or widen the environment's config")
    return tasks
