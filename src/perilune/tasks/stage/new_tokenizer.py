"""The tokenizer of a model that a stage makes. The tokenizer `bpe` is trained on the data of the stage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perilune.errors import RequestError

if TYPE_CHECKING:
    from perilune.bundle.job import Job
    from perilune.models.text.tokenizer import Tokenizer

BPE = "bpe"
MODEL = "model"  # value of `checkpoint` or `teacher` that stands for the recipe's model


def is_trained(model: Mapping[str, Any]) -> bool:
    """Return whether the tokenizer of the recipe's model is trained on data."""
    return model.get("tokenizer") == BPE


def new_tokenizer(model: Mapping[str, Any], data: Path | None) -> Tokenizer:
    """Return the tokenizer of a new model.

    Args:
        data: file with the rows that `bpe` is trained on.

    Raises:
        RequestError: when `bpe` has no data, or a row cannot be read.
    """
    from perilune.data.texts import read_training_texts
    from perilune.models.text.tokenizer import Tokenizer

    if is_trained(model) and data is None:
        raise _no_data()
    return Tokenizer.for_new_model(model, None if data is None else read_training_texts(data))


def require_data(job: Job) -> None:
    """Check that a stage that makes the recipe's model has data to train its tokenizer on.

    Raises:
        RequestError: when the model has `tokenizer: bpe`, and the stage has no data.
    """
    starts = MODEL in (job.spec.get("checkpoint"), job.spec.get("teacher")) or job.task == "new_model"
    if is_trained(job.model) and starts and not job.spec.get("data"):
        raise _no_data()


def _no_data() -> RequestError:
    return RequestError(
        "tokenizer: bpe is trained on the data of the stage that makes the model, and this stage has none",
        where="model.tokenizer",
        remedy="start from the checkpoint of an sft stage, or of {task: new_model, preset: ..., data: ...};"
        " tokenizer: bytes needs no data",
    )
