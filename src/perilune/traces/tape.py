"""A rollout worker whose model's turns come from cassettes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from perilune.data.spans import make_span_id
from perilune.engine.request import Completion, Prompt, SamplingParams
from perilune.errors import WorkFailedError
from perilune.rollout.rollout import DueTurn, Rollout
from perilune.rollout.worker import Progress, RolloutWorker
from perilune.traces.cassette import Cassette


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
        order: the span ids of the agents of each rollout's actions by the action's number, filled while
            playing.
    """

    tapes: dict[Rollout, Cassette] = field(default_factory=dict)
    until: int | None = None
    order: dict[Rollout, dict[int, str]] = field(default_factory=dict)

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
            self.order.setdefault(turn.rollout, {})[turn.number] = _span_id(turn)
            if self.until is None or turn.number < self.until:
                taped[turn] = self._replay_turn(turn)
        live = [(turn, context) for turn, context in zip(turns, contexts, strict=True) if turn not in taped]
        if live:
            parts = [list(part) for part in zip(*live, strict=True)]
            sampled = super().sample_turns(parts[0], parts[1], samples, params, progress)
            taped |= dict(zip(parts[0], sampled, strict=True))
        return [taped[turn] for turn in turns]

    def _replay_turn(self, due: DueTurn) -> Completion:
        track = self.tapes[due.rollout].track(_span_id(due))
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


def _span_id(turn: DueTurn) -> str:
    return make_span_id(turn.rollout.observation.player, turn.agent)
