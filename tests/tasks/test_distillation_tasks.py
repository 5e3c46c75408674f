"""The distill, rejection_sampling and new_model stages, and prompts with a system message."""

import json
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError
from task_cases import DIGITS, make_job, metrics, run_task, summary

from perilune.bundle.plugin import load_plugin
from perilune.data.leaks import find_leak
from perilune.data.records import read_records
from perilune.environments.core.protocol import Task
from perilune.errors import RequestError
from perilune.models.checkpoints.loading import load_checkpoint, new_model, save_checkpoint
from perilune.models.text.tokenizer import Tokenizer
from perilune.tasks.distill.loop import teacher_prompts
from perilune.tasks.stage.policy import Policy
from perilune.tasks.stage.system_message import add_system_message

ENDS = {**DIGITS, "factory": "task_environments:Ends"}
HINT = "Please end soon. "


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_task(tmp_path_factory.mktemp("larger") / "larger", "new_model")


def test_new_model_stage_writes_the_preset_shape(larger: Path) -> None:
    decoder, _ = load_checkpoint(larger / "artifacts/checkpoints/final")
    assert decoder.config.hidden_size == 128
    assert summary(larger)["parameters"] == sum(p.numel() for p in decoder.parameters())
    with pytest.raises(ValidationError):
        load_plugin("new_model").spec.model_validate({"preset": "huge"})


@pytest.mark.parametrize("loss", ["reverse_kl", "gkd"])
def test_distill_reduces_the_kl_to_a_larger_teacher(loss: str, larger: Path, tmp_path: Path) -> None:
    bundle = run_task(
        tmp_path / loss, "distill", loss=loss, teacher="larger", steps=8, lr=3e-3, samples=8,
        inputs={"teacher": larger / "artifacts/checkpoints/final"},
    )  # fmt: skip
    lines = metrics(bundle)
    assert len(lines) == 8
    names = {
        "overlap_ratio", "overlap_advantage", "overlap_advantage_verl", "overlap_mass_student",
        "overlap_mass_teacher", "topk_mass_student", "topk_mass_teacher", "entropy_gap", "entropy_gap_topk",
        "reverse_kl", "reward", "pass_rate", "length", "grad_norm",
    }  # fmt: skip
    assert names <= set(lines[0])
    assert lines[0]["overlap_k"] == summary(bundle)["overlap_k"] == 16
    assert all(line["overlap_advantage"] <= 0 for line in lines)
    first, last = (np.mean([line["reverse_kl"] for line in part]) for part in (lines[:3], lines[-3:]))
    assert last < first
    parts = summary(bundle)["length_dynamics"]
    assert parts["behaviour"] + parts["composition"] == pytest.approx(parts["after"] - parts["before"])


def test_self_distillation_has_zero_kl(tmp_path: Path) -> None:
    lines = metrics(run_task(tmp_path / "b", "distill", steps=1))
    assert lines[0]["groups"] == 3  # the trials of the interval of its pass rate
    assert lines[0]["reverse_kl"] == pytest.approx(0, abs=1e-6)
    assert lines[0]["overlap_ratio"] == 1.0


def test_only_the_teacher_sees_the_system_message(tmp_path: Path) -> None:
    lines = metrics(run_task(tmp_path / "b", "distill", steps=1, system=HINT))
    assert lines[0]["reverse_kl"] != pytest.approx(0, abs=1e-4)
    import pandas as pd

    played = pd.read_parquet(tmp_path / "b/artifacts/episodes/step-000001.parquet")
    assert not played.messages.map(lambda turns: any(turn["role"] == "system" for turn in turns)).any()


def test_gkd_mixes_on_policy_and_trace_steps(tmp_path: Path) -> None:
    traces = run_task(tmp_path / "traces", "collect")
    bundle = run_task(
        tmp_path / "b", "distill", loss="gkd", data="traces", on_policy=0.5, steps=8, max_tokens=4,
        inputs={"data": traces / "artifacts/traces"},
    )  # fmt: skip
    lines = metrics(bundle)
    own = [line["on_policy"] for line in lines]
    assert 0 < sum(own) < 8
    assert all(("reward" in line) == bool(line["on_policy"]) for line in lines)


@pytest.mark.parametrize(
    "wrong",
    [
        {"on_policy": 0.5},
        {"data": "traces"},
        {"data": "traces", "on_policy": 0.5, "loss": "reverse_kl"},
        {"task_reward": 1.0, "loss": "gkd"},
        {"task_reward": 1.0, "samples": 1},
        {"beta": 0.9},
        {"coefficient": 2.0, "loss": "gkd"},
    ],
)
def test_inconsistent_distill_options_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=r"need|can only train"):
        make_job("distill", **wrong)


def test_task_reward_changes_the_gradient(tmp_path: Path) -> None:
    plain, paid = (
        metrics(
            run_task(tmp_path / name, "distill", steps=1, task_reward=reward, samples=4, environment=ENDS)
        )
        for name, reward in (("plain", 0.0), ("paid", 5.0))
    )
    assert plain[0]["reverse_kl"] == paid[0]["reverse_kl"]
    assert paid[0]["grad_norm"] > plain[0]["grad_norm"] + 1e-3


def test_teacher_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.characters("0123456789=+ abc")
    save_checkpoint(tmp_path / "other", new_model("tiny", tokenizer, 0), tokenizer)
    with pytest.raises(RequestError, match="different vocabularies"):
        run_task(tmp_path / "b", "distill", teacher="x", inputs={"teacher": tmp_path / "other"})


def test_teacher_prompts_are_never_truncated() -> None:
    from perilune.data.episode import Episode

    tokenizer = Tokenizer.characters()
    teacher = Policy(new_model("tiny", tokenizer, 0), tokenizer)
    teacher.decoder.config = teacher.decoder.config.replace(max_position_embeddings=12)
    ids = np.array([5, 6, 7], np.int32)
    episode = Episode(
        episode_id="3/1/2", group_id="3/1", task_id="t", environment="e", seed=0,
        messages=({"role": "user", "content": "12+34="}, {"role": "assistant", "content": "abc"}),
        prompt_ids=ids, token_ids=ids, loss_mask=np.ones(3, np.bool_), logprobs=np.zeros(3, np.float32),
        policy_version=np.zeros(3, np.int32), finish_reason="length", reward=0.0,
    )  # fmt: skip
    (prompt,) = teacher_prompts([episode], teacher, "ab ")
    assert tokenizer.decode(prompt) == "ab 12+34="
    with pytest.raises(RequestError, match=r"episode 3/1/2 has 13"):
        teacher_prompts([episode], teacher, "abcd")


def test_with_system_changes_only_the_prompt() -> None:
    task = Task("t", ({"role": "user", "content": "1+1="},), {"answer": "2"}, 3.0)
    (changed,) = add_system_message([task], "Think. ")
    assert [message["role"] for message in changed.prompt] == ["system", "user"]
    assert (changed.task_id, changed.data, changed.difficulty) == (task.task_id, task.data, task.difficulty)
    assert add_system_message([task], "") == [task]


def test_collect_adds_the_system_message_of_a_strategy(tmp_path: Path) -> None:
    bundle = run_task(tmp_path / "b", "collect", system={"direct": "At once: "})
    for record in read_records(bundle / "artifacts/traces"):
        assert record.messages[0] == {"role": "system", "content": "At once: "}
    with pytest.raises(RequestError, match="the teacher has no strategy 'slow'"):
        load_plugin("collect").plan(make_job("collect", system={"slow": "x"}))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("78015;615", None),
        ("Work it out: 78015;615", "copies"),
        ("I WORK  it\nout, 615", "copies"),
        ("As  instructed, 615", "mentions its instructions: 'as instructed'"),
        ("The system prompts say 615", "mentions its instructions: 'system prompt'"),
        ("She has instructed the hinterland", None),
        ("work;615", None),  # 4 characters are shorter than the n-gram of 8
    ],
)
def test_leak_finds_copied_and_mentioned_instructions(text: str, found: str | None) -> None:
    leak = find_leak(text, "Work it out: ", "347+268=", ngram=8)
    assert (leak is None) if found is None else (leak is not None and found in leak)


def test_text_of_the_prompt_is_no_leak() -> None:
    assert find_leak("workitout", "Work it out", "please work it out", ngram=8) is None
    assert find_leak("as instructed", "x", "do as instructed", ngram=8) is None


def test_rejection_sampling_keeps_right_answers_without_the_hint(tmp_path: Path) -> None:
    bundle = run_task(tmp_path / "b", "rejection_sampling", system=HINT, environment=ENDS, min_logprob=-12.0)
    report = summary(bundle)
    records = read_records(bundle / "artifacts/traces")
    assert report["rows"] == len(records) == len({record.task_id for record in records}) > 0
    for record in records:
        assert [message["role"] for message in record.messages] == ["user", "assistant"]
        assert record.score == 1.0
        assert record.source == "sampled/hinted"
    assert 0 < report["accept_rate"] <= report["pass_rate"]
    assert 0 <= report["unhinted_pass_rate"] <= 1
    lines = (bundle / "artifacts/traces/rejected.jsonl").read_text().splitlines()
    reasons = [json.loads(line)["reason"] for line in lines]
    assert report["rejected"] == len(reasons) == round(48 * (1 - report["accept_rate"]))


def test_rejection_sampling_counts_leaks_and_implausible_answers(tmp_path: Path) -> None:
    """A log-prob threshold that no answer meets, and n-grams of 2 characters that nearly every answer has."""
    from perilune.errors import WorkFailedError

    system = "0123456789" * 3
    with pytest.raises(WorkFailedError, match=r"kept: .* implausible"):
        run_task(tmp_path / "a", "rejection_sampling", system=HINT, environment=ENDS, min_logprob=-0.01)
    assert metrics(tmp_path / "a")[0]["implausible_rate"] == 1.0
    bundle = run_task(tmp_path / "b", "rejection_sampling", system=system, environment=ENDS, ngram=2)
    line = metrics(bundle)[0]
    refused = (bundle / "artifacts/traces/rejected.jsonl").read_text()
    assert (line["leak_rate"] > 0) == ('"leak: copies' in refused)
    assert line["leak_rate"] > 0


def test_evaluate_adds_the_system_message(tmp_path: Path) -> None:
    import pandas as pd

    bundle = run_task(tmp_path / "b", "evaluate", system=HINT, tasks=2, samples=2)
    played = pd.read_parquet(bundle / "artifacts/episodes/step-000000.parquet")
    assert all(turns[0]["content"] == HINT for turns in played.messages)
