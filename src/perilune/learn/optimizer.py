"""AdamW with an accessible state: two moments per parameter, by name, and a step count.

torch.optim.AdamW is not used because checkpoints and restored moments need the state by name, and because the
first step of a torch optimizer imports the compiler, which takes a second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from perilune.errors import WorkFailedError

BETA1 = 0.9
EPSILON = 1e-8


class AdamW:
    """Decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), applied to matrices only.

    Args:
        lr_factors: factors of the learning rate by parameter name; 1 for all others.

    Attributes:
        parameters: by name; moments are float32 of the same shape.
        step: number of updates so far, for the bias correction of the moments.
        whole_norms: computes the norms of whole gradients from those of this rank's shards.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        beta2: float,
        weight_decay: float,
        grad_clip: float,
        lr_factors: Mapping[str, float] | None = None,
    ) -> None:
        self.parameters = dict(parameters)
        self.first = {name: _zeros(p) for name, p in self.parameters.items()}
        self.second = {name: _zeros(p) for name, p in self.parameters.items()}
        self.step = 0
        self.whole_norms: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict
        self._beta2 = beta2
        self._weight_decay = weight_decay
        self._grad_clip = grad_clip
        self._lr_factors = dict(lr_factors or {})

    @torch.no_grad()
    def update(self, lr: float) -> float:
        """Clip the gradient's norm, update, clear the gradients, and return the norm before clipping.

        Raises:
            WorkFailedError: when the norm is not finite; the parameters are unchanged.
        """
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        norms = {name: torch.linalg.vector_norm(gradient) for name, gradient in gradients.items()}
        norms = dict(self.whole_norms(norms)) if norms else {}
        norm = float(torch.linalg.vector_norm(torch.stack([*norms.values()]))) if norms else 0.0
        if not norm < float("inf"):
            bad = [name for name, value in norms.items() if not torch.isfinite(value)]
            raise WorkFailedError(
                f"the gradient of {', '.join(bad[:3]) or 'the model'} is not finite",
                where=f"update {self.step + 1}",
                remedy="lower lr or increase warmup",
            )
        scale = min(1.0, self._grad_clip / (norm + 1e-6))
        self.step += 1
        correction = (1 - self._beta2**self.step) ** 0.5
        for name, parameter in self.parameters.items():
            first, second = self.first[name], self.second[name]
            rate = lr * self._lr_factors.get(name, 1.0)
            gradient = gradients.get(name)
            if gradient is None:
                first.mul_(BETA1)
                second.mul_(self._beta2)
            else:
                gradient = gradient.float().mul_(scale) if scale < 1 else gradient.float()
                first.lerp_(gradient, 1 - BETA1)
                second.mul_(self._beta2).addcmul_(gradient, gradient, value=1 - self._beta2)
            if self._weight_decay and parameter.ndim > 1:
                parameter.mul_(1 - rate * self._weight_decay)
            denominator = second.sqrt().div_(correction).add_(EPSILON)
            size = rate / (1 - BETA1**self.step)
            parameter.sub_((first / denominator).mul_(size).to(parameter.dtype))
            parameter.grad = None
        return norm


def _zeros(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter, dtype=torch.float32)
