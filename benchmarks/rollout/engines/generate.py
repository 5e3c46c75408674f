"""`generate` of transformers with the growing or the static cache; on a GPU, the static one is compiled."""

import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from ..outcome import Outcome
from ..shapes import Request


class Adapter:
    """Runs one padded batch of all samples until the last sample ends."""

    log_probs = "every token, from its logits"

    def __init__(
        self,
        checkpoint: Path,
        dtype: str,
        threads: int,
        requests: Sequence[Request],
        cache: str | None,
        device: str = "cpu",
    ) -> None:
        torch.set_num_threads(threads)
        self._device = device
        transformers.logging.set_verbosity_error()
        self.kv_cache = dtype
        self._cache = cache
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype))
        self._model = model.eval().to(device)

    def versions(self) -> dict[str, str]:
        """Versions of the packages."""
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        return {**versions, "python": platform.python_version()}

    @torch.inference_mode()
    def sample(self, requests: Sequence[Request], *, temperature: float, seed: int) -> Outcome:
        """Sample from prompts padded on the left, each repeated for its samples."""
        torch.manual_seed(seed)
        longest = max(len(request.prompt) for request in requests)
        pads = [longest - len(request.prompt) for request in requests]
        inputs = torch.tensor([[0] * pad + list(r.prompt) for pad, r in zip(pads, requests, strict=True)])
        mask = (torch.arange(longest) >= torch.tensor(pads)[:, None]).long()
        limits = [request.new_tokens for request in requests for _ in range(request.n)]
        progress = _Progress(torch.tensor(limits, device=self._device))
        settings: dict[str, Any] = {"do_sample": False}
        if temperature:
            settings = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if self._cache:
            settings |= {"cache_implementation": self._cache, "disable_compile": self._device == "cpu"}
        out = self._model.generate(
            inputs.to(self._device),
            attention_mask=mask.to(self._device),
            num_return_sequences=requests[0].n,
            max_new_tokens=max(limits),
            eos_token_id=None,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([progress.keep]),
            stopping_criteria=StoppingCriteriaList([progress]),
            **settings,
        )
        tokens, logprobs = out[:, longest:].cpu().numpy(), torch.stack(progress.logprobs, 1).cpu().numpy()
        return Outcome(
            [row[:wanted] for row, wanted in zip(tokens, limits, strict=True)],
            [row[:wanted] for row, wanted in zip(logprobs, limits, strict=True)],
            progress.first,
        )


class _Keep(LogitsProcessor):  # type: ignore[misc]
    """Keeps the logits of the next token."""

    logits: Tensor

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.logits = scores
        return scores


class _Progress(StoppingCriteria):  # type: ignore[misc]
    """Records the log-prob of each drawn token, and ends samples that are long enough.

    Cheaper than `output_logits`, which keeps the logits of all steps.
    """

    def __init__(self, limits: Tensor) -> None:
        self.keep = _Keep()
        self.logprobs: list[Tensor] = []
        self.first: float | None = None
        self._limits = limits

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if self.first is None:
            self.first = time.perf_counter()
        logits = self.keep.logits.float()
        self.logprobs.append(logits.gather(1, input_ids[:, -1:])[:, 0] - logits.logsumexp(-1))
        return len(self.logprobs) >= self._limits
