"""What every source of samples offers: our engine in this process, or a server somewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from perilune.engine.request import Completion, Prompt, SamplingParams


class SamplingBackend(Protocol):
    """Continues prompts of tokens; `Engine` and `RemoteEngine` are two.

    Tokens go in and tokens come out, each with its log-prob under the distribution it was drawn from: what
    is made of them (episodes, advantages, figures) does not depend on who sampled.
    """

    @property
    def positions(self) -> int | None:
        """Most tokens of prompt and sample together; None when that is not known."""
        ...

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        params: SamplingParams,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[list[Completion]]:
        """Continue every prompt `n` times; `result[i][j]` is sample j of prompt i.

        `on_progress(finished, total)` is called now and then, with counts of samples.

        Raises:
            RequestError: when prompts or parameters do not fit the model.
            WorkFailedError: when sampling fails.
        """
        ...
