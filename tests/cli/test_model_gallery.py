"""`perilune model gallery`: the user's models and refused configurations."""

import json
from pathlib import Path

import pytest

CONFIG = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "tie_word_embeddings": True, "max_position_embeddings": 40960,
}  # fmt: skip


def test_model_gallery_adds_a_model_of_the_user(here, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(CONFIG))
    listed = here("model", "gallery", str(tmp_path / "mine.json"), "--json")
    *_, entry = json.loads(listed.stdout)
    assert (entry["name"], entry["runs"]["runs"], entry["parameters"]) == ("mine", "natively", 596_049_920)
    assert entry["layers"][0]["count"] == 28


@pytest.mark.parametrize(
    ("text", "message"),
    [("[1]", "holds a list"), (json.dumps(CONFIG | {"hidden_size": "1024"}), "hidden_size is '1024'")],
)
def test_model_gallery_refuses_hostile_configuration(here, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    done = here("model", "gallery", str(tmp_path), "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_model_gallery_compares_known_models_only(here, tmp_path: Path) -> None:
    done = here("model", "gallery", "--compare", "GPT-9", "--out", str(tmp_path / "page.html"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: --compare: no model 'GPT-9'\n  try: one of: Llama 3.1 8B")
    assert not (tmp_path / "page.html").exists()
