"""Adapter files: compatibility with PEFT in both directions, and rejection of malformed adapters."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_cases import TARGETS, TINY, TOKENS, logits, make
from safetensors.torch import load_file, save_file

from perilune.errors import RequestError
from perilune.models.adapters.files import FOLDER, Adapter, save_policy
from perilune.models.adapters.lora import BaseKind, adapter_pairs, attach_adapter, convert_base, merge_adapter
from perilune.models.attention import PackedAttention
from perilune.models.checkpoints.loading import load_checkpoint, load_decoder, new_model, save_checkpoint
from perilune.models.decoder import Decoder
from perilune.models.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.characters()
IDS = TOKENS[:20]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that transformers loads."""
    folder = tmp_path_factory.mktemp("base")
    save_checkpoint(folder, new_model(TINY, TOKENIZER, seed=3), TOKENIZER)
    return folder


def learned(base: Path, kind: BaseKind = "float32") -> Decoder:
    """The base with a trained adapter: B is not zero."""
    decoder, _ = load_checkpoint(base, base=kind)
    attach_adapter(decoder, TARGETS, 4, alpha=8.0, seed=0)
    with torch.no_grad():
        for _, b in adapter_pairs(decoder).values():
            b.copy_(torch.randn(b.shape, generator=torch.Generator().manual_seed(1)) * 0.05)
    return decoder


@torch.no_grad()
def ours(decoder: Decoder) -> torch.Tensor:
    return decoder.logits(decoder(IDS, torch.arange(20), PackedAttention(torch.tensor([0, 20]))))


@torch.no_grad()
def theirs(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(IDS[None]).logits[0]
    return logits


def test_peft_loads_our_adapter(base: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    decoder = learned(base)
    Adapter.from_decoder(decoder).save(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(base)
    start = theirs(model)
    found = theirs(PeftModel.from_pretrained(model, tmp_path))
    torch.testing.assert_close(found, ours(decoder), rtol=1e-5, atol=1e-5)
    assert (found - start).abs().max() > 1e-2


@pytest.mark.parametrize("rank_stabilized", [False, True])
def test_adapter_of_peft_loads_merges_and_attaches(base: Path, tmp_path: Path, rank_stabilized: bool) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM",
        init_lora_weights=False, use_rslora=rank_stabilized,
    )  # fmt: skip
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    model.save_pretrained(tmp_path)
    adapter, decoder = Adapter.load(tmp_path), load_decoder(Decoder, base)
    torch.testing.assert_close(ours(adapter.merge(decoder)), theirs(model), rtol=1e-5, atol=1e-5)
    adapter.attach(decoder)  # to continue training
    torch.testing.assert_close(ours(decoder), theirs(model), rtol=1e-5, atol=1e-5)
    assert {name.rpartition(".")[2] for name in adapter_pairs(decoder)} == {"q_proj", "down_proj"}


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_saved_base_with_adapter_equals_the_trained_policy(
    base: Path, tmp_path: Path, kind: BaseKind
) -> None:
    decoder = learned(base, kind)
    save_policy(tmp_path, decoder, TOKENIZER)
    with torch.no_grad():
        expected = logits(decoder)
        again, _ = load_checkpoint(tmp_path)
        assert torch.equal(logits(again), expected)
        plain = load_decoder(Decoder, base)
        assert torch.equal(logits(Adapter.load(tmp_path / FOLDER).merge(plain)), expected)
    assert all(p.requires_grad for p in plain.parameters())  # merging does not change its input


@pytest.mark.parametrize("adapted", [False, True])
def test_policy_with_bfloat16_products_is_saved_in_bfloat16_without_loss(
    base: Path, tmp_path: Path, adapted: bool
) -> None:
    decoder = learned(base) if adapted else load_decoder(Decoder, base)
    decoder.set_precision("bfloat16")
    save_policy(tmp_path, decoder, TOKENIZER)
    written = load_file(tmp_path / "model.safetensors")
    kinds = {name: tensor.dtype for name, tensor in written.items()}
    assert (
        kinds["model.layers.0.mlp.down_proj.weight"] == kinds["model.embed_tokens.weight"] == torch.bfloat16
    )
    assert kinds["model.norm.weight"] == torch.float32
    again, _ = load_checkpoint(tmp_path)
    again.set_precision("bfloat16")
    with torch.no_grad():
        assert torch.equal(logits(again), logits(decoder))


def test_base_can_be_quantized_to_int8_while_loading(base: Path) -> None:
    read, _ = load_checkpoint(base, base="int8")
    narrowed = load_decoder(Decoder, base)
    convert_base(narrowed, "int8")
    state, expected = read.state_dict(), narrowed.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    assert torch.equal(logits(merge_adapter(read)), logits(read))


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_adapter_rejects_another_base(base: Path, tmp_path: Path, kind: BaseKind) -> None:
    Adapter.from_decoder(learned(base, kind)).save(tmp_path)
    adapter, other = Adapter.load(tmp_path), new_model(TINY, TOKENIZER, seed=4)
    with pytest.raises(
        RequestError, match=f"trained on a base with checksum {kind} .*, but this base has {kind}"
    ):
        adapter.merge(other)
    adapter.check(load_decoder(Decoder, base))


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: (f / "adapter_model.safetensors").unlink(), "no adapter_model.safetensors"),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"PK\x03\x04"), "not safetensors"),
        (lambda f: edit(f, r=2), "lora_A.weight is .*, but r is 2"),
        (lambda f: (f / "base.json").write_text('{"kept": "int4"}'), "kept is not one of"),
        (lambda f: edit(f, use_dora=True), "only plain LoRA"),
        (lambda f: edit(f, modules_to_save=["lm_head"]), "modules_to_save is not implemented"),
        (lambda f: edit_tensors(f, lambda t: t.pop(KEY.format("B"))), "has only one of lora_A and lora_B"),
        (
            lambda f: edit_tensors(f, lambda t: t[KEY.format("B")].fill_(torch.nan)),
            "entries that are not finite",
        ),
        (lambda f: edit_tensors(f, lambda t: t.update({KEY.format("A"): torch.zeros(4, 7)})), "do not fit"),
        (lambda f: edit_tensors(f, lambda t: t.update(x=torch.zeros(1))), "x is not part of a LoRA pair"),
    ],
)
def test_malformed_adapters_are_rejected(
    base: Path, tmp_path: Path, change: Callable[[Path], Any], said: str
) -> None:
    Adapter.from_decoder(learned(base)).save(tmp_path)
    change(tmp_path)
    with pytest.raises(RequestError, match=said):
        Adapter.load(tmp_path).check(load_decoder(Decoder, base))


def test_adapter_rejects_head_embedding_and_norm() -> None:
    decoder = make()
    for name in ("lm_head", "model.embed_tokens", "model.norm"):
        with pytest.raises(RequestError, match="no linear map of this name"):
            Adapter({name: (torch.zeros(1, 1), torch.zeros(1, 1))}, 1.0).check(decoder)
