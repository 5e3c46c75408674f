"""Stages with a `prompting` section: stop texts, and the warning about the answer format."""

from task_cases import episodes, run_task, summary

from perilune.files import read_json_lines
from perilune.models.checkpoints.loading import new_model, save_checkpoint
from perilune.models.config.decoder_config import PRESETS
from perilune.models.text.tokenizer import Tokenizer

SUMS = {
    "id": "reasoning_gym", "task": "chain_sum", "config": {"min_terms": 2, "max_terms": 2, "max_digits": 1},
    "prompting": {"system": "Add.", "format": "answer_tags", "few_shot": 1, "stop": ["e", " "]},
}  # fmt: skip


def test_evaluate_ends_answers_at_stop_texts(tmp_path) -> None:
    workspace = run_task(tmp_path, "evaluate", max_tokens=40, environment=SUMS)
    table = episodes(workspace)
    texts = [messages[-1]["content"] for messages in table["messages"]]
    stopped = [text for text, reason in zip(texts, table["finish_reason"], strict=True) if reason == "stop"]
    assert any(text.endswith(("e", " ")) for text in stopped)  # the stop text remains part of the answer
    assert not any(end in text[:-1] for text in texts for end in ("e", " "))
    assert [message["role"] for message in table["messages"][0]] == [
        "system", "user", "assistant", "user", "assistant",
    ]  # fmt: skip
    report = summary(workspace)
    assert report["format"] == 0.0
    assert "warnings" not in report  # a new model is not expected to know the format


def test_evaluate_warns_when_a_trained_model_misses_the_format(tmp_path) -> None:
    tokenizer = Tokenizer.characters()
    save_checkpoint(tmp_path / "sft", new_model(PRESETS["tiny"], tokenizer, seed=0), tokenizer)
    inputs = {"checkpoint": tmp_path / "sft"}
    workspace = run_task(
        tmp_path / "evaluate", "evaluate", inputs=inputs, checkpoint="sft", max_tokens=40, environment=SUMS
    )
    (warning,) = summary(workspace)["warnings"]
    assert "0.0% of answers have the form" in warning and "sft stage" in warning


def test_rl_warns_about_the_format_after_its_first_steps(tmp_path) -> None:
    workspace = run_task(tmp_path, "rl", environment=SUMS)
    assert any("have the form" in warning for warning in summary(workspace)["warnings"])


def test_collected_traces_have_the_prompt_and_the_format(tmp_path) -> None:
    bundle = run_task(tmp_path, "collect", traces=3, environment=SUMS)
    rows = list(read_json_lines(bundle / "artifacts" / "traces" / "records.jsonl"))
    assert len(rows) == 3
    for row in rows:
        assert [message["role"] for message in row["messages"]] == [
            "system",
            "user",
            "assistant",
            "user",
            "assistant",
        ]
        assert row["messages"][-1]["content"].startswith("<answer>")
