"""The interface of everything that samples: the engine in this process, or a server."""

from collections.abc import Callable, Sequence
from typing import Protocol

from perilune.engine.request import Completion, Prompt, SamplingParams


class SamplingBackend(Protocol):
    """Samples completions of prompts, as `Engine` and `RemoteEngine` do.

    Input and output are tokens. Each sampled token has its log-prob under the distribution it was drawn from,
    so episodes, advantages and metrics do not depend on the backend.
    """

    @property
    def positions(self) -> int | None:
        """Most tokens of prompt and sample together; None if unknown."""

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        params: SamplingParams,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[list[Completion]]:
        """Continue every prompt `n` times; `result[i][j]` is sample j of prompt i.

        `on_progress(finished, total)` is called from time to time with counts of samples.

        Raises:
            RequestError: when the model cannot serve the prompts or parameters.
            WorkFailedError: when sampling fails.
        """
