"""What every task that touches a model starts with: device, threads, weights, environment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from perilune.bundle.workspace import Workspace
from perilune.environments.protocol import Environment, Split, Task
from perilune.environments.registry import make_environment
from perilune.errors import RequestError
from perilune.models.decoder import Decoder
from perilune.models.loading import load_checkpoint, new_model
from perilune.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Policy:
    """A model ready to sample and to learn."""

    decoder: Decoder
    tokenizer: Tokenizer

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sample: the model's own list, or the tokenizer's end-of-sequence."""
        return self.decoder.config.eos_token_ids or (self.tokenizer.eos_token_id,)


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
    wanted = resources.device if resources.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(workspace.job.seed)
    workspace.log(f"device {wanted}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    return torch.device(wanted)


def load_policy(workspace: Workspace, device: torch.device, field: str = "checkpoint") -> Policy:
    """The checkpoint that the stage's `field` consumes; else the recipe's own model."""
    if workspace.has_input(field):
        return Policy(*load_checkpoint(workspace.input(field), device))
    return start_model(workspace, device)


def start_model(workspace: Workspace, device: torch.device) -> Policy:
    """The recipe's model section: weights from a Hugging Face folder, or a fresh preset from the seed."""
    model = workspace.job.model
    if model.get("path"):
        policy = Policy(*load_checkpoint(Path(model["path"]), device))
    else:
        tokenizer = Tokenizer.characters()
        policy = Policy(new_model(model["preset"], tokenizer, workspace.job.seed).to(device), tokenizer)
    if model.get("chat_template"):
        policy.tokenizer.use_chat_template(Path(model["chat_template"]).read_text(encoding="utf-8"))
    return policy


def open_environment(workspace: Workspace) -> Environment:
    """The recipe's environment."""
    return make_environment(workspace.job.environment)


def task_stream(environment: Environment, split: Split, seed: int, skip: int = 0) -> Iterator[Task]:
    """Tasks of a split, the first `skip` left out (those an earlier attempt already used)."""
    return islice(environment.tasks(split, seed), skip, None)


def take_tasks(stream: Iterator[Task], count: int, environment: str) -> list[Task]:
    """The next `count` tasks.

    Raises:
        RequestError: when the environment runs out.
    """
    tasks = list(islice(stream, count))
    if len(tasks) < count:
        raise RequestError(
            f"{environment} gave {len(tasks)} of {count} tasks", remedy="ask for fewer, or widen its config"
        )
    return tasks
