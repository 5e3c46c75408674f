"""The interface for sampling, which the engine of this process and a remote server implement."""

from collections.abc import Callable, Sequence
from typing import Protocol

from perilune.engine.request import Completion, Prompt, SamplingParams


class SamplingBackend(Protocol):
    """Samples completions of prompts, as `Engine` and `RemoteEngine` do.

    Input and output are tokens. Each sampled token has its log-prob under the distribution from which it was
    drawn, so the code that computes advantages and metrics is the same for every backend.
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
