"""Tokenization of dataset rows: chat templates, loss masks, long rows, preference pairs and warnings."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_cases import chatml

from perilune.data.examples import read_demonstration
from perilune.data.sources import Row, read_rows
from perilune.errors import RequestError
from perilune.models.text.tokenizer import Tokenizer
from perilune.tasks.supervised.tokens import RowReader, encode_examples

# Renders tools and calls like Qwen's template.
HERMES = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{%- if message.reasoning_content %}{{- '(' + message.reasoning_content + ')' }}{%- endif %}"
    "{%- for call in message.tool_calls %}"
    "{{- '\\n<tool_call>\\n' }}{{- call.function | tojson }}{{- '\\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
USER = {"role": "user", "content": "the sum?"}
CALL = {"role": "assistant", "content": "", "tool_calls": [
    {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]}  # fmt: skip
RESULT = {"role": "tool", "content": "4"}
SAID = {"role": "assistant", "content": "4"}
TOOL = {"type": "function", "function": {"name": "add"}}


def parts(tokenizer: Tokenizer, **value: Any) -> tuple[str, str]:
    """The whole fed text and the text with loss, both with control tokens."""
    tokens = encode_examples(tokenizer, [read_demonstration(Row("a:1", value))], ["a:1"])[0]
    learned = [token for token, on in zip(tokens.token_ids, tokens.loss_mask, strict=True) if on]

    def text(ids: list[int]) -> str:
        return tokenizer._backend.decode(ids, skip_special_tokens=False)

    return text(tokens.prompt_ids + tokens.token_ids), text(learned)


def test_loss_covers_every_assistant_turn() -> None:
    fed, learned = parts(chatml(), messages=[USER, SAID, USER, {"role": "assistant", "content": "5"}])
    turn = "<|im_start|>user\nthe sum?<|im_end|>\n<|im_start|>assistant\n"
    assert fed == f"{turn}4<|im_end|>\n{turn}5<|im_end|>"
    assert learned == "4<|im_end|>5<|im_end|>"


def test_answers_in_prompt_or_with_weight_0_have_no_loss() -> None:
    answer = {"role": "assistant", "content": "5"}
    fed, learned = parts(chatml(), prompt=[USER, SAID, USER], completion=[answer])
    assert (fed.count("4<|im_end|>"), learned) == (1, "5<|im_end|>")
    again, learned = parts(chatml(), messages=[USER, {**SAID, "weight": 0}, USER, answer])
    assert (again, learned) == (fed, "5<|im_end|>")


def test_tools_and_calls_are_rendered_by_the_template() -> None:
    fed, learned = parts(chatml(HERMES), messages=[USER, CALL, RESULT, SAID], tools=[TOOL])
    call = '\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
    assert fed == (
        f"<|im_start|>system\n{json.dumps(TOOL)}<|im_end|>\n<|im_start|>user\nthe sum?<|im_end|>\n"
        f"<|im_start|>assistant\n{call}\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n4<|im_end|>"
    )
    assert learned == f"{call}4<|im_end|>"


def test_reasoning_rendered_by_the_template_has_loss() -> None:
    thought = {**SAID, "reasoning_content": "two and two"}
    assert parts(chatml(HERMES), messages=[USER, thought])[1] == "4(two and two)<|im_end|>"
    assert parts(chatml(), messages=[USER, thought])[1] == "4<|im_end|>"  # a template without reasoning


def test_tool_calls_become_text_without_template_support() -> None:
    _, learned = parts(chatml(), messages=[USER, CALL, RESULT, SAID])
    assert learned == '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>4<|im_end|>'
    with pytest.raises(RequestError, match="does not use the column 'tools'"):
        parts(chatml(), messages=[USER, SAID], tools=[TOOL])


def test_control_tokens_are_escaped_in_messages_and_kept_in_text_rows() -> None:
    hostile = {"role": "user", "content": "<|im_end|>"}
    end = chatml().eos_token_id
    chat = encode_examples(
        chatml(), [read_demonstration(Row("a:1", {"messages": [hostile, SAID]}))], ["a:1"]
    )[0]
    assert chat.prompt_ids.count(end) == 1
    text = encode_examples(chatml(), [read_demonstration(Row("a:1", {"text": "a<|im_end|>b"}))], ["a:1"])[0]
    assert (text.prompt_ids + text.token_ids).count(end) == 2


def test_text_rows_get_one_eos_and_no_template() -> None:
    for text in ("the fox", "the fox<|im_end|>"):
        fed, learned = parts(chatml(), text=text)
        assert fed == "the fox<|im_end|>" and fed.endswith(learned) and len(learned) < len(fed)
        assert parts(chatml(), prompt="says ", completion=text) == (f"says {fed}", fed)


def test_bos_token_is_added_once() -> None:
    plain = chatml()
    config = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "add_bos_token": True}
    tokenizer = Tokenizer(plain._backend, config)
    for prompt in ("a", "<|im_start|>a"):
        assert parts(tokenizer, prompt=prompt, completion="b")[0] == "<|im_start|>ab<|im_end|>"
    assert parts(tokenizer, text="ab") == ("<|im_start|>ab<|im_end|>", "ab<|im_end|>")


def chat(answer: str) -> dict:
    return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]}


def write(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_reader_warns_about_empty_and_equal_answers(tmp_path: Path) -> None:
    chats, pairs = tmp_path / "chats.jsonl", tmp_path / "pairs.jsonl"
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": " "}, chat(""), chat("c")]
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader = RowReader(Tokenizer.characters(), 64)
    assert reader.check(chats, pairs=False) == (4, 0)
    assert reader.warnings() == ["an empty answer in 2 of 4 rows, first chats.jsonl:2"]
    assert RowReader(Tokenizer.characters(), 64).noted() == {}

    compared = [{"prompt": "a", "chosen": "b", "rejected": worse} for worse in ("c", "b", "")]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in compared))
    reader = RowReader(Tokenizer.characters(), 64)
    assert reader.check(pairs, pairs=True) == (3, 0)
    assert reader.warnings() == [
        "two equal answers in 1 of 3 rows, first pairs.jsonl:2",
        "an empty answer in 1 of 3 rows, first pairs.jsonl:3",
    ]


@pytest.mark.parametrize("pairs", [False, True])
def test_validation_split_without_training_rows_is_rejected(pairs: bool, tmp_path: Path) -> None:
    path, row = tmp_path / "a.jsonl", {"prompt": "a", "completion": "b", "chosen": "b", "rejected": "c"}
    path.write_text(3 * (json.dumps(row) + "\n"))  # rows with equal prompts stay on one side of the split
    with pytest.raises(RequestError, match=r"holds out 3 of 3 rows and leaves 0 to train on") as caught:
        RowReader(Tokenizer.characters(), 64).check(path, pairs=pairs, validation=0.999)
    assert caught.value.where == str(path) and "add prompts" in caught.value.remedy


def test_long_rows_are_rejected_dropped_or_truncated(tmp_path: Path) -> None:
    characters = Tokenizer.characters()
    path = write(tmp_path / "a.jsonl", "abc", "a" * 30, "b" * 40)
    with pytest.raises(RequestError) as caught:
        RowReader(characters, 16).check(path, pairs=False)
    assert (
        caught.value.what == "the row has 31 tokens, and the model has 16 positions; 1 more row is too long"
    )
    assert caught.value.where == f"{path}:2"
    with pytest.raises(RequestError, match="max_length is 8"):
        RowReader(characters, 16, 8).check(path, pairs=False)

    dropping = RowReader(characters, 16, too_long="drop")
    dropping.check(path, pairs=False)
    assert dropping.figures() == {
        "rows": 1, "dropped": 2, "truncated": 0, "tokens": 4, "learned": 3, "longest": 4,
    }  # fmt: skip
    truncating = RowReader(characters, 16, 10, "truncate")
    kept = [tokens for _, _, tokens in truncating.demonstrations(read_rows(path))]
    assert [len(tokens) for tokens in kept] == [4, 10, 10] and truncating.truncated == 2
    assert characters.eos_token_id not in kept[1].token_ids
    assert truncating.describe() == "3 rows, 2 truncated, 24 tokens, 21 with loss; the longest has 10 of 10"


def test_truncated_row_without_loss_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "p" * 20, "completion": "c"}) + "\n")
    reader = RowReader(Tokenizer.characters(), 16, too_long="truncate")
    assert list(reader.demonstrations(read_rows(path))) == [] and reader.dropped == 1


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "naïve"}, "cannot encode 'ï'"),
        ({"messages": [USER, {**SAID, "weight": 0}]}, "no token of the row would be learned"),
    ],
)
def test_unencodable_row_and_row_without_loss_are_rejected_with_line(
    row: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + json.dumps(row) + "\n")
    reader = RowReader(Tokenizer.characters(), 64)
    with pytest.raises(RequestError) as caught:
        reader.check(path, pairs=False)
    assert said in caught.value.what and caught.value.where == f"{path}:2"


def test_preference_pairs_share_their_prompt(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    pair = {"chosen": [USER, SAID, USER, SAID], "rejected": [USER, SAID, USER, {**SAID, "content": "5"}]}
    path.write_text(json.dumps(pair) + "\n")
    reader = RowReader(chatml(), 512)
    ((_, _, better, worse),) = reader.comparisons(read_rows(path))
    assert better.prompt_ids == worse.prompt_ids and all(better.loss_mask)
    assert better.token_ids == chatml().encode_completion("4")
    assert reader.rows == 1 and reader.tokens == len(better) + len(worse)
    path.write_text(json.dumps({"prompt": "", "chosen": "a", "rejected": "b"}) + "\n")
    with pytest.raises(RequestError, match="the prompt is empty"):
        list(RowReader(chatml(), 512).comparisons(read_rows(path)))
