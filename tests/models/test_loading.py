"""Loading and saving checkpoints; rejection of malformed and hostile ones before use."""

import json
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

from perilune.errors import RequestError
from perilune.files import read_json
from perilune.models import fetch
from perilune.models.adapters.lora import convert_matrix
from perilune.models.checkpoints import folder as checkpoints_folder
from perilune.models.checkpoints import loading
from perilune.models.checkpoints.loading import load_checkpoint, load_decoder, new_model, save_checkpoint
from perilune.models.checkpoints.stored import open_checkpoint
from perilune.models.config.decoder_config import PRESETS
from perilune.models.decoder import Decoder
from perilune.models.text.tokenizer import Tokenizer
from perilune.models.transformers_model import load_for_inference
from perilune.recipe.model_files import find_model
from perilune.recipe.problems import ProblemsError

NORM = "model.layers.0.input_layernorm.weight"
EMBEDDING = "model.embed_tokens.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = Tokenizer.characters()
    save_checkpoint(tmp_path / "good", new_model("tiny", tokenizer, seed=3), tokenizer)
    return tmp_path / "good"


def edit_tensors(folder: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_load_decoder_reads_each_config_file_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    monkeypatch.setattr(
        checkpoints_folder, "read_json", lambda file: read.append(file.name) or read_json(file)
    )
    load_decoder(Decoder, folder)
    assert sorted(read) == ["config.json", "generation_config.json"]


def shard(folder: Path) -> dict[str, str]:
    """Split the weights into two shards with an index; return the shard of each tensor."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    where = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        save_file({n: t for n, t in tensors.items() if where[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return where


def test_saved_checkpoint_loads_unchanged(folder: Path) -> None:
    decoder, tokenizer = load_checkpoint(folder)
    original = new_model("tiny", tokenizer, seed=3)
    assert decoder.config == original.config
    assert decoder.config.eos_token_ids == (tokenizer.eos_token_id,)
    for name, tensor in original.state_dict().items():
        assert torch.equal(decoder.state_dict()[name], tensor)
    assert all(parameter.requires_grad for parameter in decoder.parameters())


def test_saving_a_loaded_checkpoint_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    decoder, tokenizer = load_checkpoint(folder)
    save_checkpoint(tmp_path / "again", decoder, tokenizer)
    for file in folder.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


def test_shards_are_read_by_their_index(folder: Path) -> None:
    expected = load_decoder(Decoder, folder).state_dict()
    shard(folder)
    loaded = load_decoder(Decoder, folder).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_float_dtypes_are_converted(folder: Path, dtype: torch.dtype) -> None:
    expected = load_decoder(Decoder, folder).state_dict()
    edit_tensors(folder, lambda t: t.update({n: x.to(dtype) for n, x in t.items()}))
    for name, tensor in load_decoder(Decoder, folder).state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected[name].to(dtype).float())
    assert (
        load_decoder(Decoder, folder, dtype=torch.bfloat16).logits(torch.ones(1, 96).bfloat16()).dtype
        == torch.bfloat16
    )


def test_eos_tokens_are_read_from_the_generation_config(folder: Path) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=[1, 7])
    assert load_decoder(Decoder, folder).config.eos_token_ids == (1, 7)


def test_copy_of_tied_embeddings_is_allowed(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t[EMBEDDING].clone()}))
    load_decoder(Decoder, folder)


WRONG_TENSORS: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "missing": (lambda t: t.pop(NORM), f"tensor {NORM} is missing"),
    "extra": (
        lambda t: t.update({"model.layers.0.secret": torch.zeros(1)}),
        "model.layers.0.secret is not part of this architecture",
    ),
    "a layer too many": (lambda t: t.update({NORM.replace("0", "3"): t[NORM].clone()}), "layers.3"),
    "shape": (lambda t: t.update({NORM: torch.ones(95)}), rf"{NORM} has shape \[95\]"),
    "rank": (lambda t: t.update({NORM: torch.ones(96, 1)}), rf"{NORM} has shape \[96, 1\]"),
    "integer": (lambda t: t.update({NORM: torch.ones(96, dtype=torch.int64)}), f"{NORM} is I64"),
    "fp8": (lambda t: t.update({NORM: torch.ones(96).to(torch.float8_e4m3fn)}), f"{NORM} is F8_E4M3"),
    "other head than said": (
        lambda t: t.update({"lm_head.weight": t[EMBEDDING] + 1}),
        "lm_head.weight differs from the embeddings",
    ),
    "nothing": (lambda t: t.clear(), "is missing"),
}


@pytest.mark.parametrize("case", WRONG_TENSORS)
def test_wrong_tensors_are_rejected_by_name(folder: Path, case: str) -> None:
    change, message = WRONG_TENSORS[case]
    edit_tensors(folder, change)
    with pytest.raises(RequestError, match=message) as caught:
        load_decoder(Decoder, folder)
    assert str(folder) in caught.value.where


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "last.ckpt"])
def test_pickle_weights_are_never_opened(folder: Path, name: str, tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Trap(trap)))
    with pytest.raises(RequestError, match="is a pickle") as caught:
        load_decoder(Decoder, folder)
    assert name in caught.value.where
    assert "convert" in caught.value.remedy
    assert not trap.exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_pickle_named_safetensors_is_rejected(folder: Path, zipped: bool, tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    file = folder / "model.safetensors"
    torch.save(Trap(trap), file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(RequestError, match="is a pickle"):
        load_decoder(Decoder, folder)
    assert not trap.exists()


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("damage", [b"", b"\0" * 100, b"\xff" * 100, b'{"a":1}'])
def test_damaged_safetensors_file_is_rejected(folder: Path, damage: bytes) -> None:
    (folder / "model.safetensors").write_bytes(damage)
    with pytest.raises(RequestError, match="not a safetensors file"):
        load_decoder(Decoder, folder)


def test_truncated_safetensors_file_is_rejected(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(RequestError, match="not a safetensors file"):
        load_decoder(Decoder, folder)


@pytest.mark.parametrize(
    ("content", "message"), [("{", "not valid JSON"), ("[]", "not an object"), ("{}", "model_type")]
)
def test_malformed_config_is_rejected(folder: Path, content: str, message: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(RequestError, match=message) as caught:
        load_decoder(Decoder, folder)
    assert "config.json" in caught.value.where


@pytest.mark.parametrize("key", ["num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size"])
def test_config_with_huge_sizes_is_rejected_before_allocation(folder: Path, key: str) -> None:
    edit_json(folder / "config.json", **{key: 10**12})
    with pytest.raises(RequestError, match=r"tensor model\.|give at most 10000"):
        load_decoder(Decoder, folder)


def test_missing_fused_experts_are_rejected_before_allocation(folder: Path) -> None:
    edit_json(folder / "config.json", model_type="gpt_oss", num_local_experts=10**9)
    with pytest.raises(RequestError, match="gate_up_proj of 1000000000 experts is missing"):
        load_checkpoint(folder)


def test_missing_experts_are_rejected_before_allocation(folder: Path) -> None:
    edit_json(folder / "config.json", model_type="qwen3_moe", num_experts=10**9)
    with pytest.raises(RequestError, match=r"tensor model\.layers\.0\.mlp\.experts\.999999999\.up_proj"):
        load_decoder(Decoder, folder)


def test_packed_experts_of_another_count_are_rejected_before_allocation(folder: Path) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    edit_json(folder / "config.json", model_type="qwen3_moe", num_experts=10**9, moe_intermediate_size=2)
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(3, 4, 64)}))
    with pytest.raises(RequestError, match=r"shape \[3, 4, 64\], but config.json requires \[1000000000, 4,"):
        load_decoder(Decoder, folder)


def test_unsupported_architecture_error_lists_supported_ones(folder: Path) -> None:
    edit_json(folder / "config.json", model_type="gpt_neox")
    with pytest.raises(RequestError, match="'gpt_neox', which Perilune's decoder does not compute") as caught:
        load_decoder(Decoder, folder)
    assert "qwen3" in caught.value.remedy
    assert "others can only be sampled" in caught.value.remedy


def test_missing_folder_or_file_is_rejected(folder: Path) -> None:
    with pytest.raises(RequestError, match="no such checkpoint folder"):
        load_decoder(Decoder, folder / "nowhere")
    (folder / "model.safetensors").unlink()
    with pytest.raises(RequestError, match=r"no file model\.safetensors"):
        load_decoder(Decoder, folder)
    (folder / "config.json").unlink()
    with pytest.raises(RequestError, match=r"no file config\.json"):
        load_decoder(Decoder, folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ""])
def test_index_entry_outside_the_folder_is_rejected(folder: Path, name: str) -> None:
    where = shard(folder)
    edit_json(folder / "model.safetensors.index.json", weight_map={**where, NORM: name})
    with pytest.raises(RequestError, match="leads out of the checkpoint folder"):
        load_decoder(Decoder, folder)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_malformed_index_is_rejected(folder: Path, index: str) -> None:
    shard(folder)
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(RequestError, match="weight_map"):
        load_decoder(Decoder, folder)


def test_missing_shard_is_rejected(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(RequestError, match="no file model-00002-of-00002"):
        load_decoder(Decoder, folder)


def test_tensor_in_two_shards_is_rejected(folder: Path) -> None:
    shard(folder)
    for number in (1, 2):
        file = folder / f"model-0000{number}-of-00002.safetensors"
        save_file({**load_file(file), NORM: torch.ones(96)}, file)
    with pytest.raises(RequestError, match=f"{NORM} is also in"):
        load_decoder(Decoder, folder)


FILES = [
    "model.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
]


@pytest.mark.parametrize("name", FILES)
def test_symlink_outside_the_folder_is_rejected(folder: Path, name: str) -> None:
    (folder / name).touch()
    (folder / name).rename(folder.parent / name)
    (folder / name).symlink_to(folder.parent / name)
    with pytest.raises(RequestError, match="leads out of the checkpoint folder"):
        load_checkpoint(folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.timeout(60)
def test_named_pipe_is_rejected_without_blocking(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(RequestError, match="is not a regular file"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    "content",
    ['{"model_type": "qwen3", "hidden_size": ' + "9" * 5000 + "}", "[" * 100_000, '{"a":' * 100_000, "\xff"],
    ids=["a number of 5,000 digits", "nested lists", "nested objects", "not UTF-8"],
)
def test_unparsable_config_json_is_rejected(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(RequestError, match="not valid JSON"):
        load_decoder(Decoder, folder)


def test_hugging_face_cache_snapshot_is_loaded(folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "models--someone--tiny"
    (model / "blobs").mkdir(parents=True)
    (model / "snapshots" / "abc").mkdir(parents=True)
    for number, file in enumerate(folder.iterdir()):
        file.rename(model / "blobs" / str(number))
        (model / "snapshots" / "abc" / file.name).symlink_to(Path("../../blobs") / str(number))
    load_decoder(Decoder, model / "snapshots" / "abc")


def test_tokenizer_larger_than_the_vocabulary_is_rejected(folder: Path) -> None:
    config = PRESETS["tiny"].replace(vocab_size=50)
    decoder = Decoder(config)
    save_checkpoint(folder, decoder, Tokenizer.characters())
    with pytest.raises(RequestError, match="the tokenizer has 98 tokens but the model has 50"):
        load_checkpoint(folder)


def test_missing_tokenizer_is_reported_before_missing_weights(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "model.safetensors").unlink()
    for load in (load_checkpoint, open_checkpoint):
        with pytest.raises(RequestError, match=r"no tokenizer\.json"):
            load(folder)


def test_missing_lm_head_suggests_tied_embeddings(folder: Path) -> None:
    edit_json(folder / "config.json", tie_word_embeddings=False)
    with pytest.raises(RequestError, match=r"lm_head\.weight is missing") as caught:
        load_decoder(Decoder, folder)
    assert caught.value.remedy.startswith("set tie_word_embeddings to true")


def test_missing_tensor_error_names_the_prefix_in_the_files(folder: Path) -> None:
    edit_tensors(folder, lambda t: [t.update({f"module.{name}": t.pop(name)}) for name in list(t)])
    with pytest.raises(RequestError, match=f"{EMBEDDING} is missing") as caught:
        load_decoder(Decoder, folder)
    assert f"the files call it module.{EMBEDDING}" in caught.value.remedy


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_git_lfs_pointer_is_rejected(folder: Path, name: str) -> None:
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 16\n")
    with pytest.raises(RequestError, match="is a Git LFS pointer") as caught:
        load_checkpoint(folder)
    assert caught.value.where == str(folder / name)


def test_single_file_takes_precedence_over_shard_index(folder: Path, tmp_path: Path) -> None:
    decoder, tokenizer = load_checkpoint(folder)
    shard(folder)
    decoder.initialize(seed=4)
    save_checkpoint(folder, decoder, tokenizer)
    assert torch.equal(load_decoder(Decoder, folder).model.norm.weight, decoder.model.norm.weight)
    assert torch.equal(
        load_decoder(Decoder, folder).model.embed_tokens.weight, decoder.model.embed_tokens.weight
    )


def test_adapter_folder_is_rejected_as_a_model(folder: Path) -> None:
    adapter = folder / "adapter"  # as training with LoRA writes it, inside the merged model
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(RequestError) as loading:
        load_checkpoint(adapter)
    with pytest.raises(ProblemsError) as finding:
        find_model(str(adapter), folder)
    for remedy in (loading.value.remedy, finding.value.problems[0].remedy):
        assert f"{folder}, if that is the model with the adapter merged" in remedy
    (folder / "config.json").rename(folder / "adapter_config.json")
    for load in (load_checkpoint, partial(load_decoder, Decoder), load_for_inference):
        with pytest.raises(RequestError, match="is a LoRA adapter, not a model"):
            load(folder)
    with pytest.raises(ProblemsError, match=r"has no config\.json") as caught:
        find_model(str(folder), folder)
    assert "it is a LoRA adapter" in caught.value.problems[0].remedy


def test_hub_patterns_select_each_weight_file_once() -> None:
    files = ["config.json", "model-00001-of-00002.safetensors", "chat_template.jinja"]
    copies = ["original/model.safetensors", "original/config.json", "consolidated.safetensors"]
    patterns = {"allow_patterns": list(fetch._HUB_FILES), "ignore_patterns": list(fetch._HUB_COPIES)}
    assert list(filter_repo_objects([*files, *copies, "model.py", "a.bin"], **patterns)) == files


def test_unknown_preset_is_rejected() -> None:
    with pytest.raises(RequestError, match="no model preset 'huge'") as caught:
        new_model("huge", Tokenizer.characters(), 0)
    assert "tiny" in caught.value.remedy


def test_full_disk_leaves_no_partial_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, tokenizer = load_checkpoint(folder)

    def fail(tensors: Tensors, path: Path, metadata: dict[str, str]) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("perilune.models.checkpoints.loading.save_file", fail)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path / "full", decoder, tokenizer)
    assert list((tmp_path / "full").iterdir()) == []


def test_int8_base_loads_one_float32_matrix_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole: list[int] = []

    def counted(decoder: Decoder, name: str, kind: Any) -> None:
        matrices = [matrix for matrix in decoder.parameters() if matrix.dim() == 2 and not matrix.is_meta]
        whole.append(sum(matrix.dtype == torch.float32 for matrix in matrices))
        convert_matrix(decoder, name, kind)

    monkeypatch.setattr(loading, "convert_matrix", counted)
    decoder, _ = load_checkpoint(folder, base="int8")
    assert max(whole) == 1
    assert not any(parameter.is_meta for parameter in decoder.parameters())
