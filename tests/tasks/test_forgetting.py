"""Forgetting: perplexity of English text, other environments, and the KL to the starting policy."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from task_cases import DIGITS, make_bundle, make_job, run_task, summary

from perilune.bundle.workspace import Workspace
from perilune.data.episode import Episode
from perilune.metrics.bootstrap import bootstrap_problems
from perilune.models.attention import PackedAttention
from perilune.models.checkpoints.loading import load_checkpoint, new_model, save_checkpoint
from perilune.models.text.tokenizer import Tokenizer
from perilune.tasks.forgetting.measure import CONTEXT_TOKENS, _kl_figures, measure_forgetting, read_english
from perilune.tasks.forgetting.settings import ForgettingSettings

FEW = {
    "passages": 2,
    "environments": ["reasoning_gym/spell_backward"],
    "tasks": 2,
    "samples": 2,
    "max_tokens": 4,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model, and the same model with noise on its weights."""
    root = tmp_path_factory.mktemp("models")
    decoder, tokenizer = new_model("tiny", Tokenizer.characters(), seed=0), Tokenizer.characters()
    save_checkpoint(root / "start", decoder, tokenizer)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    save_checkpoint(root / "noisy", decoder, tokenizer)
    return {"start": root / "start", "noisy": root / "noisy"}


def measured(tmp_path: Path, before: Path, after: Path) -> dict:
    workspace = Workspace(make_bundle(tmp_path / "b", make_job("rl", environment=DIGITS)))
    return measure_forgetting(
        workspace, ForgettingSettings.model_validate(FEW), before, after, torch.device("cpu")
    )


def test_unchanged_model_shows_no_forgetting(tmp_path: Path, folders: dict[str, Path]) -> None:
    stats = measured(tmp_path, folders["start"], folders["start"])
    text = stats["text"]
    assert text["perplexity"]["before"] == text["perplexity"]["after"]
    assert text["bits_per_byte"]["change"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    (other,) = stats["environments"]
    assert other["environment"] == "reasoning_gym/spell_backward" and other["tasks"] == 2
    assert other["pass@1"]["change"]["mean"] == 0
    assert stats["kl"]["answers"] == 4 and stats["kl"]["per_answer"]["mean"] == 0  # both sides use the engine
    assert stats["warnings"] == []


def test_forgetting_figures_match_the_model_logits(tmp_path: Path, folders: dict[str, Path]) -> None:
    report = measured(tmp_path, folders["start"], folders["noisy"])
    nats, size = 0.0, 0
    decoder, tokenizer = load_checkpoint(folders["noisy"])
    for text in read_english().split("\n\n")[:2]:
        tokens = torch.tensor(tokenizer.encode(text.strip()))
        with torch.no_grad():
            attention = PackedAttention(torch.tensor([0, len(tokens)]))
            logits = decoder.logits(decoder(tokens, torch.arange(len(tokens)), attention))
        logprobs = logits.log_softmax(-1)[torch.arange(len(tokens) - 1), tokens[1:]]
        nats -= float(logprobs[CONTEXT_TOKENS - 1 :].sum())
        size += len(tokens) - CONTEXT_TOKENS  # one byte per character
    assert report["text"]["bits_per_byte"]["after"] == pytest.approx(nats / math.log(2) / size, rel=1e-4)
    assert report["text"]["perplexity"]["after"] == pytest.approx(math.exp(nats / size), rel=1e-4)
    assert report["kl"]["per_answer"]["mean"] > 0


def test_rl_measures_forgetting_when_configured(tmp_path: Path, folders: dict[str, Path]) -> None:
    model = {"path": str(folders["start"])}
    options = {"steps": 1, "prompts": 2, "environment": DIGITS, "model": model}
    asked = run_task(
        tmp_path / "a", "rl", inputs={"model": folders["start"]}, forgetting=FEW | {"tasks": 0}, **options
    )
    report = summary(asked)["forgetting"]
    assert report["text"]["passages"] == 2 and report["environments"] == [] and "kl" not in report
    unasked = run_task(tmp_path / "b", "rl", inputs={"model": folders["start"]}, **options)
    assert "forgetting" not in summary(unasked)


def test_failed_forgetting_measurement_keeps_the_checkpoint(
    tmp_path: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import psutil

    monkeypatch.setattr(psutil, "virtual_memory", type("Free", (), {"available": 0, "total": 1 << 40}))
    bundle = run_task(
        tmp_path / "a",
        "rl",
        inputs={"model": folders["start"]},
        forgetting=FEW,
        steps=1,
        model={"path": str(folders["start"])},
    )
    assert "0.0 GiB are free" in summary(bundle)["forgetting"]["skipped"]


def test_forgetting_leaves_out_the_trained_environment() -> None:
    settings = ForgettingSettings(environments=("reasoning_gym/gcd", "reasoning_gym/lcm"))
    sections = settings.sections({"id": "reasoning_gym", "task": "gcd", "prompt": "compact"})
    assert sections == [{"id": "reasoning_gym", "task": "lcm", "prompting": {"few_shot": 3}}]


def test_default_environments_are_those_that_the_recipe_does_not_train_on() -> None:
    requests = {"id": "instructions", "constraints": 1, "prompting": {"few_shot": 3}}
    others = [
        {"id": "reasoning_gym", "task": task, "prompting": {"few_shot": 3}}
        for task in ("letter_counting", "number_sorting")
    ]
    settings = ForgettingSettings()
    assert settings.sections({}) == [requests, *others]
    assert settings.sections({"id": "instructions", "words": 40}) == others
    mixture = {"id": "mixture", "parts": {"a": others[0], "b": {"id": "calculator"}}}
    assert settings.sections(mixture) == [requests, others[1]]


def test_interval_of_the_kl_is_over_tasks() -> None:
    """Answers to one task resemble each other, so they do not count as independent."""
    gaps = {str(task): 0.1 * task**2 for task in range(6)}
    answers = [
        episode(task, logprobs=np.array([gap, 0.0], np.float32))
        for task, gap in gaps.items()
        for _ in range(4)
    ]
    start = SimpleNamespace(score=lambda prompts, texts: [np.zeros(2, np.float32) for _ in texts])
    found = _kl_figures(answers, start, seed=0)
    assert found["per_answer"] == pytest.approx(bootstrap_problems([*gaps.values()], seed=0)._asdict())
    assert found["per_token"] == pytest.approx(sum(gaps.values()) / 12)


def episode(task: str, logprobs: np.ndarray) -> Episode:
    tokens = np.zeros(2, np.int32)
    return Episode(
        "0/0/0",
        "0/0",
        task,
        "e",
        0,
        (),
        tokens,
        tokens,
        np.ones(2, np.bool_),
        logprobs,
        tokens,
        "stop",
        reward=0.0,
    )
