"""Speech with OpenVINO equals speech with Perilune's own kernels, up to rounding."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from speech_cases import small_config, small_model

from perilune.engine.openvino_runner import OpenVino
from perilune.errors import RequestError
from perilune.models.text.tokenizer import Tokenizer
from perilune.speech import openvino
from perilune.speech.folder import SpeechModel, new_speech_model
from perilune.speech.prompt import Utterance
from perilune.speech.sampling import SpeechSampling
from perilune.speech.stages import ChunkSizes
from perilune.speech.stream import Samples
from perilune.speech.synthesis import Speaker

if find_spec("openvino") is None:
    pytest.skip("no OpenVINO: pip install openvino", allow_module_level=True)

UTTERANCES = [
    Utterance("one two", "ada"),
    Utterance("a rather longer sentence"),
    Utterance("x", "owen", streamed_text=True),
]
GREEDY = SpeechSampling(temperature=0, rest_temperature=0, repetition_penalty=1, max_frames=30)


def spectral_model() -> SpeechModel:
    """A model with a spectral vocoder, and with equal sizes of talker and predictor."""
    tokenizer = Tokenizer.characters()
    config = small_config(tokenizer)
    codec = replace(config.codec, vocoder="spectrum", upsample_rates=(20,))
    predictor = config.predictor.replace(hidden_size=config.talker.hidden_size)
    return new_speech_model(replace(config, codec=codec, predictor=predictor), tokenizer, seed=1)


def assert_same_speech(found: Sequence[Samples], expected: Sequence[Samples]) -> None:
    """A different code would change the samples by about 0.1."""
    assert len({samples.tobytes() for samples in expected}) == len(expected)
    for samples, others in zip(found, expected, strict=True):
        assert samples.shape == others.shape
        np.testing.assert_allclose(samples, others, atol=1e-5)


@pytest.mark.parametrize("make", [small_model, spectral_model])
def test_greedy_openvino_speech_equals_native_speech(make: Any) -> None:
    model = make()
    model.sampling = GREEDY
    assert_same_speech(Speaker(model, openvino=OpenVino()).say(UTTERANCES), Speaker(model).say(UTTERANCES))


def test_openvino_speech_is_the_same_alone_preempted_and_in_other_chunks() -> None:
    model = small_model()
    model.sampling = SpeechSampling(max_frames=40)
    expected = Speaker(model).say(UTTERANCES, seed=5)
    speaker = Speaker(model, openvino=OpenVino())
    assert_same_speech(speaker.say(UTTERANCES, seed=5), expected)
    assert_same_speech([speaker.say([each], seed=5 + i)[0] for i, each in enumerate(UTTERANCES)], expected)
    tight = Speaker(model, slots=3, cache_tokens=160, chunks=ChunkSizes((3,), 5), openvino=OpenVino())
    assert_same_speech(tight.say(UTTERANCES, seed=5), expected)
    assert tight.engine.counters.preemptions > 0


@pytest.mark.parametrize("module", ["code predictor", "codec decoder"])
def test_openvino_graph_that_computes_wrongly_is_refused(
    monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    infer, first = openvino._infer, {"code predictor": "inputs", "codec decoder": "codes"}[module]

    def lose_state(request: Any, names: Sequence[str], *arrays: Any) -> list[Any]:
        outputs = infer(request, names, *arrays)
        return [outputs[0], *(0 * state for state in outputs[1:])] if names[0] == first else outputs

    monkeypatch.setattr(openvino, "_infer", lose_state)
    with pytest.raises(RequestError, match=f"CPU computes its {module} wrongly"):
        Speaker(small_model(), openvino=OpenVino())


def test_openvino_speech_refuses_unknown_device_and_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="device NPU; this machine has CPU"):
        Speaker(small_model(), openvino=OpenVino("NPU"))
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(RequestError, match="openvino is not installed"):
        Speaker(small_model(), openvino=OpenVino())
