"""A module and its optimizer that a training loop can save and resume."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from perilune.learn import checkpoints
from perilune.learn.distributed import SINGLE_RANK
from perilune.learn.optimizer import AdamW
from perilune.tasks.speech.stages import FitSettings

_BETA2 = 0.98
_GRAD_CLIP = 1.0
_FINAL_LR = 0.05  # last learning rate / the first


class Fit:
    """Fits the parameters of `module` that require gradients.

    The draws of a step depend on the seed and the number of the step only, so a resumed fit repeats them.
    """

    ranks = SINGLE_RANK

    def __init__(self, module: nn.Module, settings: FitSettings, steps: int, seed: int) -> None:
        self.module, self._settings, self._steps, self._seed = module, settings, steps, seed
        trained = {name: param for name, param in module.named_parameters() if param.requires_grad}
        self.optimizer = AdamW(trained, beta2=_BETA2, weight_decay=0.0, grad_clip=_GRAD_CLIP)

    def generator(self, step: int) -> torch.Generator:
        """Return the source of the draws of a step."""
        return torch.Generator().manual_seed((self._seed << 24) + step)

    def update(self, loss: Tensor, step: int) -> float:
        """Descend on `loss` and return the norm of its gradient."""
        loss.backward()  # type: ignore[no-untyped-call]
        settings, final = self._settings, _FINAL_LR
        rise = min(1.0, (step + 1) / settings.warmup)
        fall = final + (1 - final) * (1 + math.cos(math.pi * step / self._steps)) / 2
        return self.optimizer.update(settings.lr * rise * fall)

    def save_state(self, directory: Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write the complete state atomically to `directory`, with `extra` as JSON."""
        state = {"updates": self.optimizer.step, "extra": dict(extra or {})}
        checkpoints.write(directory, self._tensors(), state)

    def load_state(self, directory: Path) -> dict[str, Any]:
        """Restore the exact state that was saved, and return its `extra`.

        Raises:
            RequestError: when files are missing or damaged, or belong to another module.
        """
        current = self._tensors()
        tensors, state = checkpoints.read(directory, current)
        for name, target in current.items():
            checkpoints.copy_into(target, tensors[name], directory)
        self.optimizer.step = int(state["updates"])
        return dict(state["extra"])

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        weights = {name: param.detach() for name, param in self.module.named_parameters()}
        moments = {"first_moments": self.optimizer.first, "second_moments": self.optimizer.second}
        return {"weights": weights, **moments}
