"""Names that moved to `request.py` and `sampler.py`."""

from perilune.engine.request import Completion, Prompt, SamplingParams
from perilune.engine.sampler import draw

__all__ = ["Completion", "Prompt", "SamplingParams", "draw"]
