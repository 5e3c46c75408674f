"""Training by self-play: with PPO, or from the results of a search.

Proximal policy optimization is that of Schulman et al., arXiv 1707.06347. With a search, the network learns
the policy that the search improved, and the outcome (Silver et al., "Mastering the game of Go without human
knowledge", Nature 2017; for the policy see `SearchResult.improve`).
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from perilune.games.connect_four.board import Boards, count_plies, encode_planes, legal_columns
from perilune.games.connect_four.learning_settings import LearningSettings
from perilune.games.connect_four.network import Network, masked_logprobs
from perilune.games.connect_four.self_play import MoveBatch, SelfPlay, compute_advantages
from perilune.learn import checkpoints
from perilune.learn.distributed import SINGLE_RANK
from perilune.learn.optimizer import AdamW

BETA2 = 0.99
WEIGHT_DECAY = 1e-4
GRAD_CLIP = 1.0
VALUE_WEIGHT = 0.5
_TENSORS = ("weights", "first_moments", "second_moments", "games")


class Moves(NamedTuple):
    """A batch of moves to learn from.

    Attributes:
        boards: M positions.
        columns: int64[M], the columns played.
        policies: float32[M, 7], log-probabilities with which they were sampled.
        advantages: float32[M], with mean 0 and standard deviation 1.
        returns: float32[M], targets of the value.
    """

    boards: Boards
    columns: torch.Tensor
    policies: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor


class Trainer:
    """A network, its optimizer and its games: the complete state of the training.

    Attributes:
        step: number of steps so far.
    """

    ranks = SINGLE_RANK

    def __init__(self, settings: LearningSettings, seed: int) -> None:
        self.settings = settings
        torch.manual_seed(seed)
        self.network = Network(settings.channels, settings.hidden)
        self.optimizer = AdamW(
            dict(self.network.named_parameters()), beta2=BETA2, weight_decay=WEIGHT_DECAY, grad_clip=GRAD_CLIP
        )
        self.games = SelfPlay(settings.games, seed, settings.opening, settings.simulations)
        self.step = 0
        self._seed = seed

    def advance(self, progress: float) -> dict[str, float]:
        """Play a batch of moves and learn from it. `progress` in [0, 1] is the share of training done."""
        began = time.process_time()
        batch = self.games.play(self.network, self.step, self.settings.moves)
        played = time.process_time()
        figures = self._learn(batch, progress)
        self.step += 1
        learned = time.process_time()
        finished = int(batch.over.sum())
        return figures | {
            "moves": batch.columns.size,
            "games": finished,
            "first_player_wins": _first_player_win_share(batch),
            "draws": float((batch.over & (batch.rewards == 0)).sum() / max(1, finished)),
            "play_seconds": played - began,
            "learn_seconds": learned - played,
        }

    def _learn(self, batch: MoveBatch, progress: float) -> dict[str, float]:
        settings = self.settings
        gae = compute_advantages(batch, settings.trace)
        returns = torch.from_numpy((gae + batch.values[:-1]).reshape(-1))
        advantages = torch.from_numpy(((gae - gae.mean()) / (gae.std() + 1e-6)).reshape(-1))
        columns = torch.from_numpy(batch.columns.reshape(-1))
        policies = torch.from_numpy(batch.policies.reshape(len(columns), -1))
        lr = settings.lr * (1 - progress * (1 - settings.final_lr))
        sums: dict[str, float] = {}
        parts = self._minibatches(len(columns))
        for part in parts:
            chosen = torch.from_numpy(part)
            tensors = (item[chosen] for item in (columns, policies, advantages, returns))
            moves = Moves(batch.boards[part], *tensors)
            loss, figures = self._loss(moves, settings.entropy * (1 - progress))
            loss.backward()  # type: ignore[no-untyped-call]
            figures["gradient_norm"] = self.optimizer.update(lr)
            for name, value in figures.items():
                sums[name] = sums.get(name, 0.0) + value
        return {name: value / len(parts) for name, value in sums.items()}

    def _minibatches(self, moves: int) -> list[NDArray[np.int64]]:
        """Return the moves of each update: all of them once per epoch, shuffled."""
        order = np.random.default_rng([self._seed, self.step])
        parts = -(-moves // self.settings.minibatch)
        shuffled = (order.permutation(moves) for _ in range(self.settings.epochs))
        return [part for indices in shuffled for part in np.array_split(indices, parts)]

    def _loss(self, moves: Moves, entropy_weight: float) -> tuple[torch.Tensor, dict[str, float]]:
        logits, values = self.network(torch.from_numpy(encode_planes(moves.boards)))
        allowed = torch.from_numpy(legal_columns(moves.boards))
        logprobs = masked_logprobs(logits, allowed)
        entropy = -(logprobs.exp() * logprobs.masked_fill(~allowed, 0)).sum(1).mean()
        value_loss = (values - moves.returns).square().mean()
        figures = {"value_loss": float(value_loss.detach()), "entropy": float(entropy.detach())}
        if self.settings.simulations:
            policy_loss = -(moves.policies.exp() * logprobs.masked_fill(~allowed, 0)).sum(1).mean()
            figures["policy_loss"] = float(policy_loss.detach())
        else:
            surrogate, ratio_figures = self._clipped_loss(moves, logprobs)
            policy_loss = surrogate - entropy_weight * entropy
            figures |= ratio_figures
        return policy_loss + VALUE_WEIGHT * value_loss, figures

    def _clipped_loss(self, moves: Moves, logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        """Return PPO's clipped surrogate loss, and the metrics "clipped" and "kl"."""
        chosen = moves.columns[:, None]
        old, new = (values.gather(1, chosen).squeeze(1) for values in (moves.policies, logprobs))
        ratio = (new - old).exp()
        bounded = ratio.clamp(1 - self.settings.clip, 1 + self.settings.clip)
        figures = {
            "clipped": float((ratio.detach() != bounded.detach()).float().mean()),
            "kl": float((old - new.detach()).mean()),
        }
        return -torch.minimum(ratio * moves.advantages, bounded * moves.advantages).mean(), figures

    def save_state(self, directory: Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write the complete state atomically to `directory`, with `extra` as JSON."""
        tensors = {
            "weights": {name: p.detach() for name, p in self.network.named_parameters()},
            "first_moments": self.optimizer.first,
            "second_moments": self.optimizer.second,
            "games": self._game_tensors(),
        }
        state = {"step": self.step, "updates": self.optimizer.step, "extra": dict(extra or {})}
        checkpoints.write(directory, tensors, state)

    def load_state(self, directory: Path) -> dict[str, Any]:
        """Restore the exact state that was saved, and return its `extra`.

        Raises:
            RequestError: if files are missing or damaged, or belong to another network or number of games.
        """
        tensors, state = checkpoints.read(directory, _TENSORS)
        checkpoints.copy_into(dict(self.network.named_parameters()), tensors["weights"], directory)
        checkpoints.copy_into(self.optimizer.first, tensors["first_moments"], directory)
        checkpoints.copy_into(self.optimizer.second, tensors["second_moments"], directory)
        checkpoints.copy_into(self._game_tensors(), tensors["games"], directory)
        self.step, self.optimizer.step = int(state["step"]), int(state["updates"])
        return dict(state["extra"])

    def _game_tensors(self) -> dict[str, torch.Tensor]:
        """Return int64 views of the boards' words."""
        boards = self.games.boards
        words = {"own": boards.own, "stones": boards.stones}
        return {name: torch.from_numpy(array.view(np.int64)) for name, array in words.items()}


def _first_player_win_share(batch: MoveBatch) -> float:
    """Return the share of finished games that the first player won."""
    moved = count_plies(batch.boards).reshape(batch.over.shape)
    won = batch.rewards > 0
    return float((won & (moved % 2 == 0)).sum() / max(1, batch.over.sum()))
