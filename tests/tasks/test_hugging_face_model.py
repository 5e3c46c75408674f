"""A model in Hugging Face format, made by transformers, passes through every task and keeps the format."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from task_cases import SUMS, episodes, metrics, run_task, summary
from tokenizers import decoders, models, pre_tokenizers, trainers

from perilune.engine.engine import Engine
from perilune.engine.request import Prompt, SamplingParams
from perilune.environments.core.registry import make_environment
from perilune.files import read_json_lines
from perilune.models.checkpoints.loading import load_checkpoint

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = {"id": "reasoning_gym", "task": "spell_backward", "config": {"max_word_len": 4}}
OTHER = "{{ messages[-1].content }} Answer:"


def byte_level_bpe(texts: Iterable[str]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[END_OF_TEXT, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def sizes(**others: Any) -> dict[str, Any]:
    return {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.2,
    } | others  # fmt: skip


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model whose end-of-sequence token differs from the token that ends a chat turn."""
    import transformers

    folder = tmp_path_factory.mktemp("qwen")
    tasks = islice(make_environment(WORDS).tasks("train", 0), 50)
    texts = [task.prompt[0]["content"] for task in tasks]
    backend = byte_level_bpe(texts)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, pad_token=END_OF_TEXT, chat_template=CHAT
    )
    tokenizer.save_pretrained(folder)
    config = transformers.Qwen3Config(
        vocab_size=backend.get_vocab_size() + 13,  # padded, as in large models
        eos_token_id=backend.token_to_id(END_OF_TEXT),
        bos_token_id=None,
        tie_word_embeddings=True,
        **sizes(),
    )
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Journey:
    """Bundles of the four tasks in order."""

    collect: Path
    sft: Path
    evaluate: Path
    rl: Path

    @property
    def final(self) -> Path:
        return self.rl / "artifacts" / "checkpoints" / "final"


@pytest.fixture(scope="module")
def journey(qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Journey:
    """Traces, SFT and an evaluation on one environment, then RL on another environment."""
    folder = tmp_path_factory.mktemp("journey")
    model = {"path": str(qwen)}
    collect = run_task(folder / "collect", "collect", environment=WORDS, model=model, traces=30)
    inputs = {"data": collect / "artifacts" / "traces", "model": qwen}
    sft = run_task(folder / "sft", "sft", inputs=inputs, model=model, steps=10)
    started = {"checkpoint": sft / "artifacts" / "checkpoints" / "final"}
    evaluate = run_task(
        folder / "evaluate", "evaluate", inputs=started, environment=WORDS, model=model, max_tokens=12
    )
    rl = run_task(
        folder / "rl", "rl", inputs=started, model=model, checkpoint="sft", kl=0.01, samples=8, max_tokens=12
    )
    return Journey(collect, sft, evaluate, rl)


def test_gold_traces_use_the_environments_wording(journey: Journey) -> None:
    rows = list(read_json_lines(journey.collect / "artifacts" / "traces" / "records.jsonl"))
    assert len(rows) == 30
    assert all("Spell this word backward" in row["messages"][0]["content"] for row in rows)


def test_sft_evaluate_and_rl_run_on_a_hugging_face_model(journey: Journey, qwen: Path) -> None:
    losses = [line["loss"] for line in metrics(journey.sft)]
    assert losses[-1] < losses[0]
    report = summary(journey.evaluate)
    assert report["environment"] == "reasoning_gym/spell_backward"
    assert report["failures"] == 0
    _, tokenizer = load_checkpoint(qwen)
    row = episodes(journey.evaluate).iloc[0]
    assert tokenizer.encode_prompt(list(row["messages"][:1])) == row["prompt_ids"].tolist()
    assert row["prompt_ids"][0] == 1  # <|im_start|>, as one token
    assert all(line["logprob_gap_max"] <= 1e-6 for line in metrics(journey.rl))


def test_samples_end_at_the_tokenizers_end_of_sequence(journey: Journey) -> None:
    """The tokenizer's end-of-sequence token stops a sample even if the model config does not list it."""
    rows = episodes(journey.rl)
    last = rows["token_ids"].map(lambda ids: int(ids[-1]))
    ended = rows["finish_reason"] == "stop"
    assert set(last[ended]) <= {0, 2}
    assert not set(last[~ended]) & {0, 2}
    assert not rows["token_ids"].map(lambda ids: bool({0, 2} & set(ids[:-1].tolist()))).any()
    generation = json.loads((journey.final / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [0, 2]


def test_transformers_loads_the_result(journey: Journey) -> None:
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(journey.final)
    tokenizer = transformers.AutoTokenizer.from_pretrained(journey.final)
    decoder, own = load_checkpoint(journey.final)
    messages = [{"role": "user", "content": "Spell this word backward: moon. It's <|im_end|> é"}]
    prompt = [{"role": "user", "content": "Spell this word backward: moon"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == own.render_prompt(messages)
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids == own.encode_prompt(prompt)
    assert tokenizer.decode(ids, skip_special_tokens=True) == own.decode(ids)

    with torch.no_grad():
        logits = reference(torch.tensor([ids])).logits[0]
    logprobs = logits.log_softmax(-1)
    scored = Engine(decoder).score([ids[:1]], [ids[1:]])[0]
    expected = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert torch.from_numpy(scored).sub(expected).abs().max() < 1e-5

    ours = Engine(decoder).sample(
        [Prompt(ids, (0, 0, 0))], 1, SamplingParams(12, 0.0, decoder.config.eos_token_ids)
    )[0][0].token_ids.tolist()  # fmt: skip
    generated = reference.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
    assert generated.tolist() == ours


def test_every_training_stage_changes_the_weights(journey: Journey, qwen: Path) -> None:
    folders = (qwen, journey.sft / "artifacts" / "checkpoints" / "final", journey.final)
    norms = [load_checkpoint(folder)[0].model.layers[0].mlp.up_proj.weight for folder in folders]
    assert not torch.equal(norms[0], norms[1])
    assert not torch.equal(norms[1], norms[2])


def test_recipe_chat_template_replaces_that_of_the_model(qwen: Path, tmp_path: Path) -> None:
    model = {"path": str(qwen), "chat_template": OTHER}
    bundle = run_task(tmp_path / "evaluate", "evaluate", inputs={"model": qwen}, model=model, tasks=1)
    _, tokenizer = load_checkpoint(qwen)
    row = episodes(bundle).iloc[0]
    assert tokenizer.decode(row["prompt_ids"]) == row["messages"][0]["content"] + " Answer:"


def test_llama_with_character_tokenizer_and_no_chat_template(tmp_path: Path) -> None:
    """Also covers an untied output head, compact prompts, and the environment's own scorer."""
    import transformers

    folder = tmp_path / "llama"
    alphabet = ["<pad>", "<s>", "</s>", *map(chr, range(32, 127))]
    backend = tokenizers.Tokenizer(models.WordLevel({token: i for i, token in enumerate(alphabet)}))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("[\\s\\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", add_bos_token=True
    ).save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(alphabet), bos_token_id=1, eos_token_id=2, tie_word_embeddings=False, **sizes()
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    bundle = run_task(
        tmp_path / "evaluate",
        "evaluate",
        inputs={"model": folder},
        model={"path": str(folder)},
        environment=SUMS,
    )
    report, rows = summary(bundle), episodes(bundle)
    assert report["tasks"] == 6
    assert set(report["strategies"]) <= {"none", "direct", "brief", "scratchpad"}
    assert all(ids[0] == 1 for ids in rows["prompt_ids"])
    assert rows["messages"][0][0]["content"].endswith("=")
