"""Weights that another process publishes: taken between two steps, if they are what was announced."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from perilune.engine.engine import Engine
from perilune.engine.request import Request, SamplingParams
from perilune.engine.shared_weights import SharedWeights, share_weights
from perilune.errors import RequestError, WorkFailedError
from perilune.models.config import PRESETS
from perilune.models.decoder import Decoder

CONFIG = PRESETS["tiny"].replace(initializer_range=0.15, num_layers=1)
PUBLISHER = """
import json, sys
from perilune.engine.shared_weights import share_weights
from perilune.models.config import PRESETS
from perilune.models.decoder import Decoder
decoder = Decoder(PRESETS["tiny"].replace(initializer_range=0.15, num_layers=1))
decoder.initialize(1)
with share_weights(decoder.state_dict(), 7) as weights:
    print(json.dumps(weights.to_json()), flush=True)
    sys.stdin.read()
"""


def make(seed: int) -> Decoder:
    decoder = Decoder(CONFIG)
    decoder.initialize(seed)
    return decoder


def test_another_process_changes_the_weights_between_two_tokens() -> None:
    engine = Engine(make(0), slots=2, cache_tokens=512)
    engine.add(Request([5, 6, 7], SamplingParams(6)))
    deltas = [delta for _ in range(3) for delta in engine.step()]
    with subprocess.Popen(
        [sys.executable, "-c", PUBLISHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as publisher:
        assert publisher.stdout is not None
        weights = SharedWeights.from_json(json.loads(publisher.stdout.readline()))
        engine.update_weights(weights.read(), weights.version)
        publisher.communicate("")
    assert not Path(weights.path).exists()
    while engine.unfinished:
        deltas += engine.step()
    assert [version for delta in deltas for version in delta.policy_version] == [0, 0, 0, 7, 7, 7]
    tokens = [token for delta in deltas for token in delta.token_ids]
    (expected,) = Engine(make(1), cache_tokens=512).score([[5, 6, 7, *tokens[:3]]], [tokens[3:]])
    assert [logprob for delta in deltas for logprob in delta.logprobs][3:] == expected.tolist()
    with pytest.raises(WorkFailedError, match="the weights are gone"):
        weights.read()


def test_bytes_that_changed_are_not_used() -> None:
    with share_weights(make(0).state_dict(), 3) as weights:
        assert weights.read().keys() == make(0).state_dict().keys()
        with Path(weights.path).open("r+b") as file:
            file.seek(weights.size - 1)
            file.write(b"\x55")
        with pytest.raises(WorkFailedError, match="version 3 are not those announced"):
            weights.read()
        with pytest.raises(WorkFailedError, match="checksum"):
            SharedWeights(weights.path, weights.size + 1, weights.digest, 3).read()


@pytest.mark.parametrize(
    "document", [{}, {"path": "x"}, {"path": 1, "size": 1, "digest": "", "version": 1}, {"extra": 1}]
)
def test_announcements_are_checked(document: dict[str, object]) -> None:
    with pytest.raises(RequestError):
        SharedWeights.from_json(document)


def test_weights_of_another_model_change_nothing() -> None:
    decoder = make(0)
    engine = Engine(decoder, cache_tokens=256)
    state = make(1).state_dict()
    wrong_shape = state | {"model.norm.weight": torch.ones(5)}
    renamed = {name.replace("norm", "nrom"): tensor for name, tensor in state.items()}
    for bad, message in (
        (wrong_shape, r"model\.norm\.weight is \[5\], not \[96\]"),
        (renamed, "on one side only"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.update_weights(bad, 1)
    assert engine.version == 0
    for name, tensor in make(0).state_dict().items():
        assert torch.equal(decoder.state_dict()[name], tensor)
