"""The optimizer check: weights and moments change only by updates that follow AdamW's equations.

In each parameter, the check follows one element: the one with the largest gradient in a sample of elements.
The element's update is recomputed in float64 (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2). Between
two updates the element must not change. This finds, for example, an optimizer that is recreated at each step.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from perilune.errors import REPORT_BUG, WorkFailedError
from perilune.learn.optimizer import BETA1, EPSILON
from perilune.learn.trainer import CRITIC_PREFIX, Learner
from perilune.learn.training_settings import OptimizerSettings

CANDIDATES = 512  # size of the sample of elements of a parameter
TOLERANCE = 1e-3  # relative error of an update, in addition to the rounding of the weight

Array = NDArray[np.float64]


class _State(NamedTuple):
    """float64[N]: one element of each parameter, and its moments."""

    weights: Array
    first: Array
    second: Array


class OptimizerChecker:
    """Checks the updates of a learner.

    Args:
        learner: its `optimizer` is read at every update, because a bug may replace it.
        critic_lr: the critic's peak learning rate; by default the decoder's.
    """

    def __init__(self, learner: Learner, settings: OptimizerSettings, critic_lr: float | None = None) -> None:
        self._learner, self._settings = learner, settings
        self._critic_factor = 1.0 if critic_lr is None else critic_lr / settings.peak_lr
        self._places: dict[str, int] = {}
        self._last: _State | None = None  # after the last update

    @contextmanager
    def check_update(self, lr: float) -> Iterator[None]:
        """Check the update that the block makes with the current gradients.

        Args:
            lr: the decoder's learning rate.

        Raises:
            WorkFailedError: naming a parameter, and the mistake if it is a known one.
        """
        self._check_unchanged()
        gradients, norm = self._choose_elements()
        before, step = self._read_state(), self._learner.optimizer.step
        yield
        after, now = self._read_state(), self._learner.optimizer.step
        if now != step + 1:
            raise self._error(f"the optimizer's step count went from {step} to {now}")
        self._check_update(gradients, norm, before, after, lr)
        self._last = after

    @torch.no_grad()
    def _choose_elements(self) -> tuple[Array, float]:
        """Choose one element of each parameter; return their gradients and the norm of the whole gradient."""
        indices, gradients, norms = {}, [], {}
        for name, parameter in self._learner.optimizer.parameters.items():
            if not parameter.numel():  # this process has no shard of the parameter
                continue
            indices[name] = 0
            gradient = parameter.grad
            if gradient is None:
                gradients.append(parameter.new_zeros((), dtype=torch.float32))
                continue
            flat = gradient.reshape(-1)
            stride = max(1, len(flat) // CANDIDATES)
            indices[name] = int(flat[::stride].abs().argmax()) * stride
            gradients.append(flat[indices[name]].float())
            norms[name] = torch.linalg.vector_norm(gradient)
        norms = dict(self._learner.optimizer.gather_norms(norms)) if norms else {}
        self._places = indices
        norm = torch.linalg.vector_norm(torch.stack([*norms.values()])) if norms else 0.0
        return torch.stack(gradients).double().cpu().numpy(), float(norm)

    @torch.no_grad()
    def _read_state(self) -> _State:
        def chosen(tensors: Mapping[str, torch.Tensor]) -> Array:
            elements = [tensors[name].reshape(-1)[index].double() for name, index in self._places.items()]
            return torch.stack(elements).cpu().numpy()

        optimizer = self._learner.optimizer
        return _State(chosen(optimizer.parameters), chosen(optimizer.first), chosen(optimizer.second))

    def _check_unchanged(self) -> None:
        if self._last is None:
            return
        for field, before, after in zip(_State._fields, self._last, self._read_state(), strict=True):
            changed = np.flatnonzero(before != after)
            if len(changed):
                name = list(self._places)[changed[0]]
                kind = "weights" if field == "weights" else f"{field} moments"
                lost = ": the optimizer lost its state" if field != "weights" and not after.any() else ""
                raise self._error(f"the {kind} of {name} changed between two updates{lost}")

    def _check_update(self, gradients: Array, norm: float, before: _State, after: _State, lr: float) -> None:
        clip = self._settings.grad_clip
        scale = min(1.0, clip / (norm + 1e-6))
        critics = np.array([name.startswith(CRITIC_PREFIX) for name in self._places])
        rates = lr * np.where(critics, self._critic_factor, 1.0)
        updated = self._expected_state(gradients * scale, before, rates)
        for field, expected, actual, old in zip(_State._fields, updated, after, before, strict=True):
            allowed = TOLERANCE * np.abs(expected - old) + 1e-30
            allowed += np.abs(old) * (self._rounding() if field == "weights" else 1e-5)
            wrong = np.flatnonzero(~(np.abs(actual - expected) <= allowed))
            if not len(wrong):
                continue
            first = wrong[0]
            mistakes = self._mistakes(gradients, scale, before, rates)
            reason = next(
                (mistake for mistake, state in mistakes.items() if _are_close(state, after, wrong)), ""
            )
            raise self._error(
                f"{len(wrong)} of {len(self._places)} parameters did not move as AdamW says, the first is"
                f" {list(self._places)[first]}: its {_NAMES[field]} went from {old[first]:.6g} to"
                f" {actual[first]:.6g}, and should be {expected[first]:.6g}{reason and ': ' + reason}"
            )

    def _expected_state(
        self,
        gradients: Array,
        before: _State,
        lr: Array,
        *,
        decayed: bool | None = None,
        corrected: bool = True,
    ) -> _State:
        """Return the state after AdamW's update.

        Args:
            decayed: weight decay on all or no parameters; by default on matrices only.
            corrected: whether the moments are corrected for their bias.
        """
        beta2, step = self._settings.beta2, self._learner.optimizer.step
        first = BETA1 * before.first + (1 - BETA1) * gradients
        second = beta2 * before.second + (1 - beta2) * gradients**2
        mean, spread = (1 - BETA1**step, 1 - beta2**step) if corrected else (1.0, 1.0)
        parameters = self._learner.optimizer.parameters
        # The biases of experts are stacked into a matrix.
        matrices = np.array(
            [parameters[name].ndim > 1 and not name.endswith("bias") for name in self._places]
        )
        decay = self._settings.weight_decay * (
            matrices if decayed is None else np.full(len(matrices), decayed)
        )
        weights = before.weights * (1 - lr * decay)
        return _State(weights - lr * (first / mean) / (np.sqrt(second / spread) + EPSILON), first, second)

    def _rounding(self) -> Array:
        parameters = self._learner.optimizer.parameters
        return np.array([8 * torch.finfo(parameters[name].dtype).eps for name in self._places])

    def _mistakes(self, gradients: Array, scale: float, before: _State, lr: Array) -> Mapping[str, _State]:
        """Return the states after updates with known mistakes."""
        clipped = gradients * scale
        zeros = np.zeros_like(gradients)
        return {
            "it was not updated at all": before,
            "the update climbs the loss": self._expected_state(clipped, before, -lr),
            "weight decay was applied to norms and biases": self._expected_state(
                clipped, before, lr, decayed=True
            ),
            "weight decay was left out": self._expected_state(clipped, before, lr, decayed=False),
            "the moments are not corrected for their bias": self._expected_state(
                clipped, before, lr, corrected=False
            ),
            "the gradient was clipped twice": self._expected_state(clipped * scale, before, lr),
            "the gradient was not clipped": self._expected_state(gradients, before, lr),
            "the moments were reset": self._expected_state(clipped, _State(before.weights, zeros, zeros), lr),
        }

    def _error(self, message: str) -> WorkFailedError:
        return WorkFailedError(message, where=f"update {self._learner.version}", remedy=REPORT_BUG)


_NAMES = {"weights": "weight", "first": "first moment", "second": "second moment"}


def _are_close(one: _State, other: _State, places: NDArray[np.int64]) -> bool:
    return all(
        np.allclose(left[places], right[places], rtol=1e-5, atol=1e-12)
        for left, right in zip(one, other, strict=True)
    )
