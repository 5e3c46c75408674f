"""AdamW with an accessible state: two moments per parameter, by name, and a step count.

torch.optim.AdamW is not used because checkpoints and restored moments need the state by name, and because the
first step of a torch optimizer imports the compiler, which takes a second.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from perilune.errors import WorkFailedError

BETA1 = 0.9
EPSILON = 1e-8


class AdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101), with weight decay on matrices only.

    Args:
        lr_factors: factors of the learning rate by parameter name; 1 for all others.

    Attributes:
        parameters: the trained parameters by name.
        first, second: the moments by name, float32 with the shape of the parameter.
        step: number of updates so far, for the bias correction of the moments.
        gather_norms: computes the norms of whole gradients from the norms of this rank's shards.
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
        self.gather_norms: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict
        self._beta2 = beta2
        self._weight_decay = weight_decay
        self._grad_clip = grad_clip
        self._lr_factors = dict(lr_factors or {})
        self._lr = 0.0  # of the last update

    @torch.no_grad()
    def update(self, lr: float) -> float:
        """Clip the gradient's norm, update, clear the gradients, and return the norm before clipping.

        Raises:
            WorkFailedError: when the norm is not finite; the parameters are unchanged.
        """
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        norms = {name: torch.linalg.vector_norm(gradient) for name, gradient in gradients.items()}
        norms = dict(self.gather_norms(norms)) if norms else {}
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
        self._lr = lr
        for name, parameter in self.parameters.items():
            first, second = self.first[name], self.second[name]
            gradient = gradients.get(name)
            if gradient is None:
                first.mul_(BETA1)
                second.mul_(self._beta2)
            else:
                gradient = gradient.float().mul_(scale) if scale < 1 else gradient.float()
                first.lerp_(gradient, 1 - BETA1)
                second.mul_(self._beta2).addcmul_(gradient, gradient, value=1 - self._beta2)
            if (decay := self._decay_factor(name)) != 1:
                parameter.mul_(decay)
            parameter.sub_(self._last_change(name).to(parameter.dtype))
            parameter.grad = None
        return norm

    @torch.no_grad()
    def bounds_before_update(self, name: str) -> tuple[Tensor, Tensor]:
        """Return lower and upper bounds, float32, of a float32 parameter before the last update.

        AdamW can be inverted: before = (after + change) / decay, and the moments give the same change again.
        The update rounds twice and its inversion twice, each time by at most 2^-24 of the largest magnitude
        that occurs, |before| + |change|. The bounds allow for eight times that.
        """
        change = self._last_change(name)
        before = (self.parameters[name] + change).div_(self._decay_factor(name))
        margin = change.abs_().add_(before.abs()).mul_(2.0**-21).add_(2.0**-140)
        return before - margin, before + margin

    def _last_change(self, name: str) -> Tensor:
        """Return the change that the last update subtracted from a parameter after its decay."""
        correction = (1 - self._beta2**self.step) ** 0.5
        denominator = self.second[name].sqrt().div_(correction).add_(EPSILON)
        size = self._rate(name) / (1 - BETA1**self.step)
        return (self.first[name] / denominator).mul_(size)

    def _decay_factor(self, name: str) -> float:
        if self.parameters[name].ndim == 1 or name.endswith("bias"):  # the biases of experts are stacked
            return 1.0
        return 1 - self._rate(name) * self._weight_decay

    def _rate(self, name: str) -> float:
        return self._lr * self._lr_factors.get(name, 1.0)


def _zeros(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter, dtype=torch.float32)
