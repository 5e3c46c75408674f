"""`perilune serve` with a speech model: audio, errors, the web page and metrics."""

import io
import re
import struct
import sys
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from served import Served, served

sys.path.append(str(Path(__file__).parent.parent / "speech"))
from speech_cases import small_model

from perilune.errors import RequestError
from perilune.serve.server import serve
from perilune.serve.settings import Settings
from perilune.speech.folder import load_speech_model, save_speech_model
from perilune.speech.prompt import Utterance
from perilune.speech.sampling import SpeechSampling
from perilune.speech.synthesis import Speaker

TEXTS = ["one two", "three", "four and five"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = small_model()
    model.sampling = SpeechSampling(max_frames=20)
    save_speech_model(tmp_path_factory.mktemp("speech") / "voice", model)
    return tmp_path_factory.getbasetemp() / "speech0" / "voice"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with served(folder) as server:
        yield server


def body(text: str, **more: object) -> dict[str, object]:
    return {"model": "voice", "input": text, "voice": "ada", "seed": 3, "response_format": "pcm", **more}


def test_speech_streams_match_the_model(server: Served, folder: Path) -> None:
    speaker = Speaker(load_speech_model(folder))
    expected = [speaker.say([Utterance(text, "ada")], seed=3)[0] for text in TEXTS]

    def ask(text: str) -> tuple[int, bytes]:
        with server.http() as http, http.stream("POST", "/v1/audio/speech", json=body(text)) as answer:
            assert answer.status_code == 200
            assert answer.headers["transfer-encoding"] == "chunked"
            pieces = list(answer.iter_raw())
            return len(pieces), b"".join(pieces)

    with ThreadPoolExecutor(len(TEXTS)) as threads:
        answers = list(threads.map(ask, TEXTS))
    for (pieces, data), samples in zip(answers, expected, strict=True):
        assert np.array_equal(np.frombuffer(data, "<i2"), (samples * 32767).round().astype("<i2"))
        assert pieces > 1
    metrics = server.metrics()
    assert sum(value for name, value in metrics.items() if "real_time_factor_count" in name) >= len(TEXTS)
    assert sum(value for name, value in metrics.items() if "first_audio_seconds_count" in name) >= len(TEXTS)
    assert any(name.startswith("speech_underruns_total{streams=") for name in metrics)


def test_text_is_streamed_on_request(server: Served, folder: Path) -> None:
    utterances = [Utterance("one two", "ada", streamed_text=streamed) for streamed in (False, True)]
    whole, streamed = (Speaker(load_speech_model(folder)).say([item], seed=3)[0] for item in utterances)
    request = body("one two", stream=False, non_streaming_mode=False)
    with server.http() as http:
        answer = http.post("/v1/audio/speech", json=request).content
    assert np.array_equal(np.frombuffer(answer, "<i2"), (streamed * 32767).round().astype("<i2"))
    assert not np.array_equal(streamed, whole)


def test_speech_as_wav_file_and_wav_stream(server: Served) -> None:
    with server.http() as http:
        plain = http.post("/v1/audio/speech", json=body("one", stream=False)).content
        whole = http.post("/v1/audio/speech", json=body("one", stream=False, response_format="wav"))
        streamed = http.post("/v1/audio/speech", json=body("one", response_format="wav")).content
    assert whole.headers["content-type"] == "audio/wav"
    with wave.open(io.BytesIO(whole.content)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (2000, 1, 2)
        assert file.readframes(file.getnframes()) == plain
    assert streamed[44:] == plain
    assert struct.unpack("<I", streamed[40:44])[0] == 0xFFFFFFFF


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"input": ""}, 400, "input"),
        ({"input": "x" * 250}, 400, "input"),
        ({"input": "日本"}, 400, None),
        ({"voice": "alloy"}, 400, "voice"),
        ({"voice": "x" * 10_000}, 400, "voice"),
        ({"language": "klingon"}, 400, "language"),
        ({"response_format": "mp3"}, 400, "response_format"),
        ({"speed": 2}, 400, "speed"),
        ({"speed": "fast"}, 400, "speed"),
        ({"unknown": 1}, 400, "unknown"),
    ],
)
def test_speech_refuses_invalid_requests(
    server: Served, change: dict[str, object], status: int, param: str | None
) -> None:
    with server.http() as http:
        answer = http.post("/v1/audio/speech", json=body("one") | change)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert 0 < len(error["message"]) < 500
    assert param is None or error["param"] == param


def test_speaker_refuses_long_instructions_before_embedding(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speaker, embedded = Speaker(load_speech_model(folder)), []
    embed = speaker._talker.embed_text
    monkeypatch.setattr(speaker._talker, "embed_text", lambda ids: embedded.append(len(ids)) or embed(ids))
    for length, message in ((300, "311 tokens"), (1 << 20, "1,048,579 characters")):
        with pytest.raises(RequestError, match=message):
            speaker.request(Utterance("one", instructions="x" * length), 0)
    assert not embedded


def test_client_disconnect_frees_its_utterance(server: Served) -> None:
    with (
        server.http() as http,
        http.stream("POST", "/v1/audio/speech", json=body("a long sentence to leave")) as left,
    ):
        next(left.iter_raw())
    at_rest = server.at_rest()
    assert at_rest["speech_streams"] == 0


@pytest.mark.skipif(find_spec("openvino") is None, reason="no OpenVINO: pip install openvino")
def test_openvino_speech_server_sends_the_same_audio(folder: Path) -> None:
    expected = Speaker(load_speech_model(folder)).say([Utterance(TEXTS[0], "ada")], seed=3)[0]
    with served(folder, "--backend", "openvino") as server, server.http() as http:
        answer = http.post("/v1/audio/speech", json=body(TEXTS[0]))
    samples = np.frombuffer(answer.content, np.int16)
    assert samples.shape == expected.shape
    assert np.abs(samples - expected * 32767).max() < 2


def test_speech_page_loads_only_its_own_files(server: Served) -> None:
    with server.http() as http:
        page = http.get("/")
        assert page.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        for name in re.findall(r'(?:src|href)="([^"]+)"', page.text):
            part = http.get(f"/{name}")
            assert part.status_code == 200
            assert "http://" not in part.text
            assert "https://" not in part.text
        assert "<script>" not in page.text
        voices = http.get("/v1/audio/voices").json()
        assert voices["voices"] == ["default", "ada", "owen"]
        assert http.get("/v1/models").json()["data"][0]["id"] == "voice"


def test_speech_server_refuses_options_of_text_models(folder: Path) -> None:
    settings = Settings(folder, name="voice", port=0)
    for option, changed in (
        ("--weight-updates", replace(settings, weight_updates=True)),
        ("--speculate", replace(settings, speculate="lookup")),
        ("--dtype", replace(settings, backend="openvino", dtype="bfloat16")),
    ):
        with pytest.raises(RequestError) as refused:
            serve(changed, print)
        assert refused.value.where == option
