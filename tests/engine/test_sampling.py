"""Drawing tokens by inverting the cumulative distribution."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perilune.engine.request import SamplingParams
from perilune.engine.sampler import draw
from perilune.errors import RequestError

ONE_BELOW_ONE = 1 - 2.0**-53


def test_draw_maps_uniforms_to_tokens_by_cumulative_probability() -> None:
    logprobs = torch.tensor([[0.5, 0.25, 0.25]]).log().expand(6, -1)
    uniform = torch.tensor([0, 0.499, 0.501, 0.749, 0.751, ONE_BELOW_ONE], dtype=torch.float64)
    assert draw(logprobs, uniform).tolist() == [0, 0, 1, 1, 2, 2]


def test_draw_frequencies_equal_the_probabilities() -> None:
    probabilities = torch.tensor([0.05, 0.0, 0.6, 0.3, 0.05])
    count = 100_000
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    drawn = draw(probabilities.log().expand(count, -1), uniform)
    frequencies = torch.bincount(drawn, minlength=5) / count
    torch.testing.assert_close(frequencies, probabilities, rtol=0, atol=1e-5)


@given(
    st.lists(st.sampled_from([0.0, 1e-30, 1e-7, 0.1, 1.0]), min_size=1, max_size=30).filter(any),
    st.sampled_from([0.0, 0.5, 1e-300, ONE_BELOW_ONE]) | st.floats(0, ONE_BELOW_ONE),
)
def test_draw_never_returns_a_token_of_zero_probability(weights: list[float], uniform: float) -> None:
    logprobs = torch.tensor([weights]).log().log_softmax(-1)
    token = draw(logprobs, torch.tensor([uniform], dtype=torch.float64)).item()
    assert weights[int(token)] > 0


def test_draw_returns_the_last_token_for_nan_logprobs() -> None:
    assert draw(torch.full((1, 4), torch.nan), torch.tensor([0.5], dtype=torch.float64)).item() == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"max_tokens": 4, "temperature": -1.0},
        {"max_tokens": 4, "temperature": float("nan")},
        {"max_tokens": 4, "temperature": float("inf")},
    ],
)
def test_sampling_params_reject_invalid_max_tokens_and_temperature(wrong: dict[str, float]) -> None:
    with pytest.raises(RequestError):
        SamplingParams(**wrong)  # type: ignore[arg-type]
