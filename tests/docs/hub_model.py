"""A small Qwen3-shaped checkpoint with a chat template, where a downloaded model would lie."""

from __future__ import annotations

from pathlib import Path

from perilune.models.checkpoints.loading import new_model, save_checkpoint
from perilune.models.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def put_in_cache(home: Path, model_id: str) -> None:
    """Lay the checkpoint into the Hugging Face cache at `home` as `model_id`."""
    model = home / "hub" / f"models--{model_id.replace('/', '--')}"
    snapshot = model / "snapshots" / "0123456789abcdef"
    snapshot.parent.mkdir(parents=True)
    tokenizer = Tokenizer.characters().with_chat_template(TEMPLATE, where="test")
    save_checkpoint(snapshot, new_model("tiny", tokenizer, seed=0), tokenizer)
    reference = model / "refs" / "main"
    reference.parent.mkdir()
    reference.write_text(snapshot.name)
