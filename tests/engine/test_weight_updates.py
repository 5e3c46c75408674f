"""Weight updates between two steps of the engine."""

import pytest
import torch

from perilune.engine.engine import Engine
from perilune.engine.request import Request, SamplingParams
from perilune.errors import RequestError
from perilune.models.config.decoder_config import PRESETS
from perilune.models.decoder import Decoder

CONFIG = PRESETS["tiny"].replace(initializer_range=0.15, num_layers=1)


def make(seed: int) -> Decoder:
    decoder = Decoder(CONFIG)
    decoder.initialize(seed)
    return decoder


def test_tokens_after_a_weight_update_come_from_the_new_weights() -> None:
    engine = Engine(make(0), slots=2, cache_tokens=512)
    engine.add(Request([5, 6, 7], SamplingParams(6)))
    deltas = [delta for _ in range(3) for delta in engine.step()]
    engine.update_weights(make(1).state_dict(), 7)
    while engine.unfinished:
        deltas += engine.step()
    assert [version for delta in deltas for version in delta.policy_version] == [0, 0, 0, 7, 7, 7]
    tokens = [token for delta in deltas for token in delta.token_ids]
    (expected,) = Engine(make(1), cache_tokens=512).score([[5, 6, 7, *tokens[:3]]], [tokens[3:]])
    assert [logprob for delta in deltas for logprob in delta.logprobs][3:] == expected.tolist()


def test_embeddings_come_from_updated_weights() -> None:
    engine = Engine(make(0), slots=2, cache_tokens=512)
    list(engine.embed([[5, 6, 7]], "mean"))  # copies the weights
    engine.update_weights(make(1).state_dict(), 1)
    fresh = Engine(make(1), slots=2, cache_tokens=512)
    (((found,),), ((expected,),)) = (list(one.embed([[5, 6, 7]], "mean")) for one in (engine, fresh))
    assert found.tolist() == expected.tolist()


def test_update_weights_rejects_state_of_another_model() -> None:
    decoder = make(0)
    engine = Engine(decoder, cache_tokens=256)
    state = make(1).state_dict()
    wrong_shape = state | {"model.norm.weight": torch.ones(5)}
    renamed = {name.replace("norm", "nrom"): tensor for name, tensor in state.items()}
    for bad, message in (
        (wrong_shape, r"model\.norm\.weight has shape \[5\], not \[96\]"),
        (renamed, "only one of the decoder and the new state has"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.update_weights(bad, 1)
    assert engine.version == 0
    for name, tensor in make(0).state_dict().items():
        assert torch.equal(decoder.state_dict()[name], tensor)
