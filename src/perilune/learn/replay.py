"""Routing replay in the learner (R3, Ma et al., arXiv 2510.11370).

The learner computes each token with the experts that the sampler recorded. Only the choice of experts is
replayed. Their weights are the current router's probabilities of these experts, so the router still has a
gradient.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.data.episode import Episode
from perilune.data.routes import missing_rows
from perilune.learn.figures import Figures


def pack_routes(episodes: Sequence[Episode], prompt_of: Sequence[int]) -> Tensor | None:
    """Pack routes int16[N, layers, K] of the fed tokens: of all prompts, then of all completions.

    A row of -1 is missing: the router chooses the experts. Rows of a shared prompt are missing where two
    episodes have different routes, because different versions of the policy computed them.

    Args:
        prompt_of: index of each episode's prompt, in order of first use.

    Returns:
        None if no episode has routes.
    """
    shape = next((e.routed_experts.shape[1:] for e in episodes if e.routed_experts is not None), None)
    if shape is None:
        return None
    prompts: dict[int, np.ndarray] = {}
    completions = []
    for episode, prompt in zip(episodes, prompt_of, strict=True):
        rows = _signed_routes(episode, shape)
        prompt_rows = rows[: len(episode.prompt_ids)]
        shared = prompts.setdefault(prompt, prompt_rows)
        shared[(shared != prompt_rows).any(axis=(1, 2))] = -1
        completions.append(rows[len(episode.prompt_ids) :])
    return torch.from_numpy(np.concatenate([*prompts.values(), *completions]))


def _signed_routes(episode: Episode, shape: tuple[int, ...]) -> np.ndarray:
    """Return routes int16[P + T - 1, layers, K], -1 in missing rows."""
    routes = episode.routed_experts
    if routes is None:
        return np.full((len(episode.prompt_ids) + len(episode.token_ids) - 1, *shape), -1, np.int16)
    signed = routes.astype(np.int16)
    signed[missing_rows(routes)] = -1
    return signed


class RouteReplay:
    """A `Routing` that replays the routes of a batch, and compares them with the router's own choice.

    Args:
        routes: int16[N, layers, K], see `pack_routes`. Further rows of a batch are padding.
    """

    def __init__(self, routes: Tensor) -> None:
        self._routes = routes
        self._flipped = torch.zeros(len(routes), dtype=torch.bool, device=routes.device)
        self._loads: dict[int, Tensor] = {}

    def forced_experts(self, layer: int, rows: int) -> Tensor | None:
        ids = self._routes[:, layer].long()
        return F.pad(ids, (0, 0, 0, rows - len(ids)), value=-1)

    @torch.no_grad()
    def observe(self, layer: int, logits: Tensor, own: Tensor, chosen: Tensor) -> None:
        """Record the routes of a layer. Activation checkpointing calls this again in the backward pass."""
        count = len(self._routes)
        used = chosen[:count].sort(-1).values
        self._flipped |= (used != own[:count].sort(-1).values).any(-1)
        uses = torch.bincount(used.flatten(), minlength=logits.shape[-1])
        self._loads[layer] = uses / max(used.numel(), 1)

    def add_figures(self, figures: Figures) -> None:
        """Add the shares of tokens with missing and with changed routes, and the load of the experts."""
        missing = self._routes[:, 0, 0] < 0
        figures.add_mean("routing/missing", missing.double())
        if not missing.all():
            figures.add_mean("routing/flipped", self._flipped[~missing].double())
        loads = torch.stack(list(self._loads.values())).double()
        figures.add_max("routing/load_max", loads * loads.shape[1])
        figures.add_mean("routing/load_entropy", -torch.xlogy(loads, loads).sum(-1) / np.log(loads.shape[1]))
