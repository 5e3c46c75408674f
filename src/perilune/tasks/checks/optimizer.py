"""The optimizer check: updates move weights and moments as AdamW's equations say, and nothing else does.

It follows one element of every parameter, the one with the largest gradient among a few, and computes its
update again in float64 (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2). Between two updates those
elements must not change: an optimizer that is made anew at each step has lost its moments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from perilune.errors import REPORT_BUG, WorkFailedError
from perilune.learn.optimizer import BETA1, EPSILON
from perilune.learn.trainer import CRITIC, Learner
from perilune.learn.training_settings import OptimizerSettings

LOOKED_AT = 512  # elements of a parameter among which the largest gradient is chosen
TOLERANCE = 1e-3  # of an update, relative to it; the weight may be rounded besides

Array = NDArray[np.float64]


class _State(NamedTuple):
    """float64[N], one element of each parameter."""

    weights: Array
    first: Array
    second: Array


class OptimizerChecker:
    """Watches the updates of a learner from one step to the next.

    Args:
        learner: whose `optimizer` is asked anew at every update: it may have been replaced.
        settings: what the run asks of AdamW.
        critic_lr: the critic's peak learning rate where it is not the decoder's.
    """

    def __init__(self, learner: Learner, settings: OptimizerSettings, critic_lr: float | None = None) -> None:
        self._learner, self._settings = learner, settings
        self._critic_factor = 1.0 if critic_lr is None else critic_lr / settings.peak_lr
        self._places: dict[str, int] = {}
        self._left: _State | None = None  # as the last update left them

    @contextmanager
    def watched(self, lr: float) -> Iterator[None]:
        """Check the update that is made inside, with the gradients that are there when it begins.

        Raises:
            WorkFailedError: naming a parameter, and the mistake if it is a known one.
        """
        self._check_untouched()
        gradients, norm = self._look()
        before, step = self._read(), self._learner.optimizer.step
        yield
        after = self._read()
        self._check_step(step)
        self._check_update(gradients, norm, before, after, lr)
        self._left = after

    @torch.no_grad()
    def _look(self) -> tuple[Array, float]:
        """Choose the elements; their gradients, and the norm of the whole gradient."""
        places, found, norms = {}, [], {}
        for name, parameter in self._learner.optimizer.parameters.items():
            if not parameter.numel():  # another process has all of it
                continue
            places[name] = 0
            gradient = parameter.grad
            if gradient is None:
                found.append(parameter.new_zeros((), dtype=torch.float32))
                continue
            flat = gradient.reshape(-1)
            stride = max(1, len(flat) // LOOKED_AT)
            places[name] = int(flat[::stride].abs().argmax()) * stride
            found.append(flat[places[name]].float())
            norms[name] = torch.linalg.vector_norm(gradient)
        norms = dict(self._learner.optimizer.whole_norms(norms)) if norms else {}
        self._places = places
        size = torch.linalg.vector_norm(torch.stack([*norms.values()])) if norms else 0.0
        return torch.stack(found).double().cpu().numpy(), float(size)

    @torch.no_grad()
    def _read(self) -> _State:
        optimizer = self._learner.optimizer
        sources = (optimizer.parameters, optimizer.first, optimizer.second)
        return _State(*(
            torch.stack([source[name].reshape(-1)[place].double() for name, place in self._places.items()])
            .cpu().numpy()
            for source in sources
        ))  # fmt: skip

    def _check_untouched(self) -> None:
        if self._left is None:
            return
        now = self._read()
        for what, was, found in zip(_State._fields, self._left, now, strict=True):
            changed = np.flatnonzero(was != found)
            if len(changed):
                name, kind = (
                    list(self._places)[changed[0]],
                    "weights" if what == "weights" else f"{what} moments",
                )
                lost = ": the optimizer lost its state" if what != "weights" and not found.any() else ""
                raise self._wrong(f"the {kind} of {name} changed between two updates{lost}")

    def _check_step(self, before: int) -> None:
        found = self._learner.optimizer.step
        if found != before + 1:
            raise self._wrong(f"the optimizer's step count went from {before} to {found}")

    def _check_update(self, gradients: Array, norm: float, before: _State, after: _State, lr: float) -> None:
        clip = self._settings.grad_clip
        scale = min(1.0, clip / (norm + 1e-6))
        critics = np.array([name.startswith(CRITIC) for name in self._places])
        rates = lr * np.where(critics, self._critic_factor, 1.0)
        right = self._updated(gradients * scale, before, rates)
        for what, theirs, found, started in zip(_State._fields, right, after, before, strict=True):
            allowed = TOLERANCE * np.abs(theirs - started) + 1e-30
            allowed += np.abs(started) * (self._rounding() if what == "weights" else 1e-5)
            wrong = np.flatnonzero(~(np.abs(found - theirs) <= allowed))
            if not len(wrong):
                continue
            name = list(self._places)[wrong[0]]
            mistakes = self._mistakes(gradients, scale, before, rates)
            why = next((told for told, state in mistakes.items() if _same(state, after, wrong)), "")
            raise self._wrong(
                f"{len(wrong)} of {len(self._places)} parameters did not move as AdamW says, the first is"
                f" {name}: its {_NAMES[what]} went from {started[wrong[0]]:.6g} to {found[wrong[0]]:.6g}, and"
                f" should be {theirs[wrong[0]]:.6g}{why and ': ' + why}"
            )

    def _updated(
        self,
        gradients: Array,
        before: _State,
        lr: Array,
        *,
        decayed: bool | None = None,
        corrected: bool = True,
    ) -> _State:
        """AdamW's update; decay on matrices only, unless `decayed` says on all or none."""
        beta2, step = self._settings.beta2, self._learner.optimizer.step
        first = BETA1 * before.first + (1 - BETA1) * gradients
        second = beta2 * before.second + (1 - beta2) * gradients**2
        mean, spread = (1 - BETA1**step, 1 - beta2**step) if corrected else (1.0, 1.0)
        parameters = self._learner.optimizer.parameters
        matrices = np.array([parameters[name].ndim > 1 for name in self._places])
        decay = self._settings.weight_decay * (
            matrices if decayed is None else np.full(len(matrices), decayed)
        )
        weights = before.weights * (1 - lr * decay)
        return _State(weights - lr * (first / mean) / (np.sqrt(second / spread) + EPSILON), first, second)

    def _rounding(self) -> Array:
        parameters = self._learner.optimizer.parameters
        return np.array([8 * torch.finfo(parameters[name].dtype).eps for name in self._places])

    def _mistakes(self, gradients: Array, scale: float, before: _State, lr: Array) -> Mapping[str, _State]:
        """What known mistakes would have made of the elements."""
        clipped = gradients * scale
        whole = np.zeros_like(gradients)
        return {
            "it was not updated at all": before,
            "the update climbs the loss": self._updated(clipped, before, -lr),
            "weight decay was applied to norms and biases": self._updated(clipped, before, lr, decayed=True),
            "weight decay was left out": self._updated(clipped, before, lr, decayed=False),
            "the moments are not corrected for their bias": self._updated(
                clipped, before, lr, corrected=False
            ),
            "the gradient was clipped twice": self._updated(clipped * scale, before, lr),
            "the gradient was not clipped": self._updated(gradients, before, lr),
            "the moments were reset": self._updated(clipped, _State(before.weights, whole, whole), lr),
        }

    def _wrong(self, what: str) -> WorkFailedError:
        return WorkFailedError(what, where=f"update {self._learner.version}", remedy=REPORT_BUG)


_NAMES = {"weights": "weight", "first": "first moment", "second": "second moment"}


def _same(one: _State, other: _State, places: NDArray[np.int64]) -> bool:
    return all(
        np.allclose(mine[places], theirs[places], rtol=1e-5, atol=1e-12)
        for mine, theirs in zip(one, other, strict=True)
    )
