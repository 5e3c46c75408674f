"""Small checkpoints with a chat template, in the places of downloaded models."""

from pathlib import Path

from gguf_cases import write_gguf
from perilune.files import write_json
from perilune.models.checkpoints.loading import new_model, save_checkpoint
from perilune.models.gguf.convert import convert
from perilune.models.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def put_in_cache(home: Path, model_id: str) -> None:
    """Save a small checkpoint as `model_id` in the Hugging Face cache at `home`."""
    model = home / "hub" / f"models--{model_id.replace('/', '--')}"
    snapshot = model / "snapshots" / "0123456789abcdef"
    snapshot.parent.mkdir(parents=True)
    tokenizer = Tokenizer.characters().with_chat_template(TEMPLATE, where="test")
    save_checkpoint(snapshot, new_model("tiny", tokenizer, seed=0), tokenizer)
    reference = model / "refs" / "main"
    reference.parent.mkdir()
    reference.write_text(snapshot.name)


def put_in_home(home: Path, name: str) -> None:
    """Save a small Llama with a byte-level tokenizer as the fetched model `name` of the home."""
    folder = home / "models" / name
    folder.mkdir(parents=True)
    gguf = write_gguf(home / "small.gguf")
    convert(gguf, folder)
    gguf.unlink()
    write_json(folder / "source.json", {"kind": "package", "requirement": "small==0.1", "sha256": "0" * 64})
