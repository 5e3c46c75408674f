"""The tensors that a server reads from a checkpoint."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from perilune.errors import RequestError
from perilune.weights.checkpoint import load_tensors


def test_checkpoint_of_integers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    wanted = {"a": {"dtype": "float32", "shape": [3]}}
    save_file({"a": torch.ones(3).half()}, tmp_path / "model.safetensors")
    assert load_tensors(tmp_path, wanted)["a"].tolist() == [1, 1, 1]
    save_file({"a": torch.ones(3).long()}, tmp_path / "model.safetensors")
    with pytest.raises(RequestError, match="tensor a is I64, not one of F64"):
        load_tensors(tmp_path, wanted)
