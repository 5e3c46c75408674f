"""A rollout worker whose model's turns come from cassettes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from perilune.engine.request import Completion, Prompt, SamplingParams
from perilune.errors import WorkFailedError
from perilune.rollout.rollout import DueTurn, Rollout
from perilune.rollout.worker import Progress, RolloutWorker
from perilune.traces.cassette import Cassette

SUB_AGENTS_REFUSED = "a cassette cannot hold turns of sub-agents, or of a player's later contexts, yet"


@dataclass(frozen=True)
class NoEngine:
    """An engine that only knows the context window: every turn is on the tape."""

    positions: int | None

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        params: SamplingParams,
        on_progress: Progress | None = None,
    ) -> list[list[Completion]]:
        """Refuse: there is no model.

        Raises:
            WorkFailedError: always.
        """
        raise WorkFailedError("a replay without a model asked for a sample", remedy="give a checkpoint")


@dataclass(frozen=True)
class TapedWorker(RolloutWorker):
    """A rollout worker whose turns come from tapes.

    Attributes:
        tapes: the cassette of each rollout.
        until: number of actions of an episode after which the engine samples; None: never. A turn that the
            tape lacks is then aborted, which ends the episode.
        order: the players of each rollout's actions, filled while playing.
    """

    tapes: dict[Rollout, Cassette] = field(default_factory=dict)
    until: int | None = None
    order: dict[Rollout, list[int]] = field(default_factory=dict)

    def sample_turns(
        self,
        turns: Sequence[DueTurn],
        contexts: Sequence[list[int]],
        samples: int,
        params: SamplingParams,
        progress: Progress,
    ) -> list[Completion]:
        """Return each turn: from the tape of its rollout, or sampled."""
        taped: dict[DueTurn, Completion] = {}
        for turn in turns:
            self.order.setdefault(turn.rollout, []).append(turn.rollout.observation.player)
            if self.until is None or turn.number < self.until:
                taped[turn] = self._replay_turn(turn)
        live = [(turn, context) for turn, context in zip(turns, contexts, strict=True) if turn not in taped]
        if live:
            parts = [list(part) for part in zip(*live, strict=True)]
            sampled = super().sample_turns(parts[0], parts[1], samples, params, progress)
            taped |= dict(zip(parts[0], sampled, strict=True))
        return [taped[turn] for turn in turns]

    def _replay_turn(self, due: DueTurn) -> Completion:
        if due.agent:
            raise WorkFailedError(SUB_AGENTS_REFUSED)
        track = self.tapes[due.rollout].track(due.rollout.observation.player)
        number = len(due.trajectory.turns)
        turn = track.turns[number] if track is not None and number < len(track.turns) else None
        count = len(turn.tokens) if turn else 0
        ending = "aborted" if turn is None else "stop" if turn.finished else "length"
        return Completion(
            np.array(turn.tokens if turn else (), np.int32),
            np.zeros(count, np.float32),
            np.zeros(count, np.int32),
            ending,  # type: ignore[arg-type]
        )
