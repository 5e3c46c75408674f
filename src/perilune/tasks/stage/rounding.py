"""The bounds on rounding for a decoder."""

from perilune.metrics.rounding import ROUNDING, Rounding
from perilune.models.decoder import Decoder

_MIN_PLAIN_BOUND = 1e-3  # nats; least bound for a comparison with `plain_logprobs`, which sums differently


def rounding_of(decoder: Decoder) -> Rounding:
    """Return the bounds on rounding for the decoder's device and precision."""
    precision = "bfloat16" if decoder.precision == "bfloat16" else "float32"
    device = next(decoder.parameters()).device.type
    return ROUNDING.get((precision, device), ROUNDING[precision, "cuda"])


def is_exact(decoder: Decoder) -> bool:
    """Return whether the decoder is on a CPU, where float32 log-probs of engine and learner are identical."""
    return next(decoder.parameters()).device.type == "cpu"


def plain_rounding(decoder: Decoder) -> Rounding:
    """Return `rounding_of`, but at least the bound that a comparison with `plain_logprobs` needs."""
    rounding = rounding_of(decoder)
    return rounding if rounding.largest >= _MIN_PLAIN_BOUND else Rounding(_MIN_PLAIN_BOUND)
