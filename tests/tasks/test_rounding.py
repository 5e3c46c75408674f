"""Rounding limits: per token where bits must be equal, otherwise by the mean and the KL divergence."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from task_cases import episodes, run_task

from perilune.metrics.rounding import ROUNDING, Rounding
from perilune.models.checkpoints.loading import new_model
from perilune.models.text.tokenizer import Tokenizer
from perilune.tasks.stage import publishing
from perilune.tasks.stage.rounding import plain_rounding, rounding_of

GPU = ROUNDING["bfloat16", "cuda"]
RNG = np.random.default_rng(0)
NOISE = RNG.normal(0, 0.012, 200_000)


class Bare(torch.nn.Module):
    """A stand-in decoder with a precision and a device."""

    def __init__(self, precision: str, device: str) -> None:
        super().__init__()
        self.precision = precision
        self.weight = torch.nn.Parameter(torch.zeros(1, device=device))


def test_rounding_noise_of_many_tokens_is_allowed() -> None:
    noise = NOISE.copy()
    noise[7] = 1.4  # the largest difference of a step, far beyond any limit on one token
    assert GPU.allows(noise)
    assert not ROUNDING["bfloat16", "cpu"].allows(noise)


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(NOISE + 0.08, id="biased"),
        pytest.param(NOISE * 7, id="wide"),
        pytest.param(np.where(np.arange(len(NOISE)) % 50 == 0, -1.6, NOISE), id="every fiftieth token"),
        pytest.param(np.append(NOISE, np.nan), id="not finite"),
    ],
)
def test_errors_beyond_rounding_are_refused(mistake: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
    assert not GPU.allows(mistake)


def test_wrong_temperature_is_refused() -> None:
    logits = torch.from_numpy(RNG.normal(0, 2, (5_000, 64)))
    right, wrong = logits.log_softmax(-1), (logits / 0.8).log_softmax(-1)
    drawn = torch.multinomial(right.exp(), 1, generator=torch.Generator().manual_seed(0))
    assert not GPU.allows((right.gather(1, drawn) - wrong.gather(1, drawn))[:, 0].numpy())


def test_permits_decides_by_aggregate_figures() -> None:
    k3 = np.expm1(-NOISE) + NOISE
    assert GPU.allows_statistics(float(np.abs(NOISE).max()), float(np.abs(NOISE).mean()), float(k3.mean()))
    assert not GPU.allows_statistics(0.1, 0.06, 0.001)
    assert not GPU.allows_statistics(0.1, 0.01, 0.02)
    assert not Rounding(1e-4).allows_statistics(2e-4, 0.0, 0.0)


def test_rounding_limits_depend_on_device_and_precision() -> None:
    assert rounding_of(Bare("float32", "cpu")).largest == 1e-4  # type: ignore[arg-type]
    assert plain_rounding(Bare("float32", "cpu")).largest == 1e-3  # type: ignore[arg-type]
    assert rounding_of(Bare("bfloat16", "meta")) == GPU  # type: ignore[arg-type]
    assert plain_rounding(Bare("bfloat16", "meta")).largest == math.inf  # type: ignore[arg-type]
    assert not GPU.allows(np.full(16, 0.2))
    assert GPU.allows(np.zeros(0))


def test_plain_scores_are_computed_in_chunks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = new_model("tiny", Tokenizer.characters(), seed=0)
    ids = RNG.integers(90, size=70)
    whole, first = publishing.plain_scores(decoder, ids, 69, 0.7, whole=5)
    monkeypatch.setattr(publishing, "_LOGIT_ROWS", 16)
    rows: list[int] = []
    logits = decoder.logits
    monkeypatch.setattr(decoder, "logits", lambda states: rows.append(len(states)) or logits(states))
    chunked, again = publishing.plain_scores(decoder, ids, 69, 0.7, whole=5)
    assert rows == [16, 16, 16, 16, 5]
    assert torch.equal(whole, chunked)
    assert torch.equal(first, again)
    assert torch.equal(first.gather(1, torch.from_numpy(ids[1:6, None]))[:, 0], whole[:5])


def test_evaluate_samples_in_the_configured_precision(tmp_path: Path) -> None:
    of_first_token = []
    for precision in ("float32", "bfloat16"):
        played = episodes(run_task(tmp_path / precision, "evaluate", tasks=4, samples=2, precision=precision))
        first = {name: rows[0] for name, rows in zip(played.episode_id, played.logprobs, strict=True)}
        of_first_token.append(np.array([first[name] for name in sorted(first)]))
    exact, rounded = of_first_token
    assert (exact != rounded).any()
    np.testing.assert_allclose(rounded, exact, atol=0.2)


def test_evaluate_with_top_k_1_equals_greedy(tmp_path: Path) -> None:
    played = run_task(tmp_path, "evaluate", tasks=4, samples=3, sampling={"top_k": 1})
    greedy = episodes(played, "greedy.parquet").set_index("task_id")
    for row in episodes(played).itertuples():
        assert row.token_ids.tolist() == greedy.token_ids[row.task_id].tolist()
        assert not np.any(row.logprobs)  # log-probs of the only possible token are 0
