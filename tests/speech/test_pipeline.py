"""The speech pipeline: its output equals the modules run one by one, in every batch and order."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from speech_cases import small_model

from perilune.engine.engine import Engine
from perilune.errors import RequestError
from perilune.models.attention import PackedAttention
from perilune.speech.folder import SpeechModel
from perilune.speech.pipeline import Pipeline, Stage
from perilune.speech.prompt import Utterance, embed_utterance
from perilune.speech.sampling import SpeechSampling
from perilune.speech.stages import ChunkSizes, DecoderStage
from perilune.speech.stream import FrameInputs, SpeechDelta
from perilune.speech.synthesis import Speaker

TEXTS = ["one two", "a rather longer sentence", "x"]
FRAMES = 12
UTTERANCES = [
    Utterance(text, speaker, streamed_text=text == "x")
    for text, speaker in zip(TEXTS, ["ada", None, "owen"], strict=True)
]


@pytest.fixture(scope="module")
def model() -> SpeechModel:
    model = small_model()
    model.sampling = SpeechSampling(max_frames=FRAMES)
    return model


@torch.inference_mode()
def reference_speech(model: SpeechModel, utterance: Utterance, frames: int) -> np.ndarray:
    """Greedy speech without engine, cache or stages: each code from the whole sequence before it."""
    talker, marks = model.talker, model.config.marks
    prompt = embed_utterance(talker, model.tokenizer, utterance)
    rows, codes = prompt.inputs, torch.zeros(0, 4, dtype=torch.long)
    for frame in range(frames):
        length = len(rows)
        hidden = talker(rows, torch.arange(length), PackedAttention(torch.tensor([0, length])))[-1:]
        logits = talker.logits(hidden)[0]
        logits[32:][torch.arange(32, len(logits)) != marks.eos] = -torch.inf
        if frame < 2:
            logits[marks.eos] = -torch.inf
        first = int(logits.argmax())
        if first == marks.eos:
            break
        row = torch.tensor([[first, 0, 0, 0]])
        for code in range(1, 4):
            row[0, code] = talker.predictor(hidden, talker.embed_codec(row[:, 0]), row)[0, code - 1].argmax()
        codes = torch.cat([codes, row])
        rows = torch.cat([rows, talker.embed_frames(row) + prompt.text_of(frame)])
    return model.codec(codes[None])[0].numpy()


def test_pipeline_output_equals_uncached_reference(model: SpeechModel) -> None:
    greedy = SpeechSampling(temperature=0, rest_temperature=0, repetition_penalty=1, max_frames=FRAMES)
    alone = SpeechModel(model.talker, model.codec, model.tokenizer, greedy)
    speech = Speaker(alone).say(UTTERANCES)
    assert len({samples.tobytes() for samples in speech}) == len(speech)
    for utterance, samples in zip(UTTERANCES, speech, strict=True):
        expected = reference_speech(model, utterance, FRAMES)
        assert samples.shape == expected.shape
        np.testing.assert_allclose(samples, expected, atol=1e-4)


def test_utterance_is_independent_of_its_batch(model: SpeechModel) -> None:
    together = Speaker(model).say(UTTERANCES, seed=5)
    tight = Speaker(model, slots=2, cache_tokens=96, chunks=ChunkSizes((3,), 5)).say(UTTERANCES, seed=5)
    speaker = Speaker(model)
    for i, utterance in enumerate(UTTERANCES):
        assert np.array_equal(together[i], speaker.say([utterance], seed=5 + i)[0])
        assert np.array_equal(together[i], tight[i])
    assert not np.array_equal(together[0], speaker.say(UTTERANCES[:1], seed=6)[0])


def test_preempted_utterances_are_recomputed_exactly(model: SpeechModel) -> None:
    roomy, scarce = Speaker(model), Speaker(model, slots=4, cache_tokens=96)
    assert all(
        np.array_equal(*pair) for pair in zip(roomy.say(UTTERANCES), scarce.say(UTTERANCES), strict=True)
    )
    assert scarce.engine.counters.preemptions > 0


def test_deltas_report_chunk_sizes_and_latencies(model: SpeechModel) -> None:
    now = 0.0
    speaker = Speaker(model, clock=lambda: now, chunks=ChunkSizes((2, 4), 6))
    frame, ids = model.config.codec.frame_seconds, []
    for i, utterance in enumerate(UTTERANCES[:2]):
        ids.append(speaker.pipeline.add(speaker.request(utterance, seed=i)))
    heard: dict[int, list[int]] = {request_id: [] for request_id in ids}
    ends: dict[int, SpeechDelta] = {}
    while speaker.pipeline.unfinished:
        now += frame / 8
        for delta in speaker.pipeline.step():
            assert isinstance(delta, SpeechDelta)
            heard[delta.request_id] += [len(part) for part in delta.audio]
            if delta.times is not None:
                ends[delta.request_id] = delta
    assert [sizes[:2] for sizes in heard.values()] == [[2 * 40, 4 * 40]] * 2  # the first chunks are small
    for request_id, end in ends.items():
        assert end.times is not None
        assert end.times.streams in (1, 2)
        assert 0 < end.times.first_code < end.times.first_audio < end.times.seconds
        assert end.times.audio == pytest.approx(sum(heard[request_id]) / 2000)
        assert end.times.underruns == 0
    speaker.say([UTTERANCES[0]])
    assert speaker.open() == 0


def test_slow_stages_are_counted_as_underruns(model: SpeechModel) -> None:
    now = 0.0
    speaker = Speaker(model, clock=lambda: now)
    speaker.pipeline.add(speaker.request(UTTERANCES[0], seed=0))
    deltas = []
    while speaker.pipeline.unfinished:
        now += model.config.codec.frame_seconds  # three or four steps a frame
        deltas += speaker.pipeline.step()
    assert deltas[-1].times.underruns >= 1
    assert deltas[-1].times.real_time_factor > 1


def test_abort_frees_all_resources_of_an_utterance(model: SpeechModel) -> None:
    speaker = Speaker(model)
    ids = [speaker.pipeline.add(speaker.request(utterance, seed=i)) for i, utterance in enumerate(UTTERANCES)]
    for _ in range(12):
        speaker.pipeline.step()
    for request_id in ids:
        speaker.pipeline.abort(request_id)
    assert not speaker.pipeline.unfinished
    assert not speaker.engine.unfinished
    assert speaker.engine.cache_use == 0


def test_failed_utterance_does_not_affect_others(model: SpeechModel) -> None:
    speaker = Speaker(model)
    expected = speaker.say(UTTERANCES[1:2], seed=1)[0]
    requests = [speaker.request(utterance, seed=i) for i, utterance in enumerate(UTTERANCES[:2])]
    assert isinstance(requests[0].inputs, FrameInputs)
    with torch.inference_mode():
        requests[0].inputs.rows(0, 1).fill_(torch.nan)
    ids = [speaker.pipeline.add(request) for request in requests]
    deltas: dict[int, list[SpeechDelta]] = {request_id: [] for request_id in ids}
    while speaker.pipeline.unfinished:
        for delta in speaker.pipeline.step():
            deltas[delta.request_id].append(delta)  # type: ignore[arg-type]
    assert [delta.failure is not None for delta in deltas[ids[0]]] == [True]
    speech = np.concatenate([part for delta in deltas[ids[1]] for part in delta.audio])
    assert np.array_equal(speech, expected)


def test_restart_drops_unfinished_utterances(model: SpeechModel, monkeypatch: pytest.MonkeyPatch) -> None:
    speaker = Speaker(model)
    expected = speaker.say(UTTERANCES[:1])[0]
    speaker.pipeline.add(speaker.request(UTTERANCES[1], seed=0))
    for _ in range(3):
        speaker.pipeline.step()
    with monkeypatch.context() as broken, pytest.raises(ZeroDivisionError):
        broken.setattr(DecoderStage, "_decode", lambda *_: 1 / 0)
        while True:
            speaker.pipeline.step()
    speaker.pipeline.restart()
    assert not speaker.pipeline.unfinished
    assert np.array_equal(speaker.say(UTTERANCES[:1])[0], expected)


class Counting(Stage[float]):
    """A stage that only has deadlines."""

    def __init__(self, name: str, log: list[str], *deadlines: float) -> None:
        super().__init__()
        self.name, self.log, self.queue = name, log, dict(enumerate(deadlines))

    def deadline(self) -> float | None:
        return min(self.queue.values(), default=None)

    def step(self) -> list[float]:
        self.log.append(self.name)
        del self.queue[min(self.queue, key=self.queue.__getitem__)]
        return []

    def feed(self, items: Sequence[float]) -> None:
        assert not items


def test_pipeline_schedules_earliest_deadline_then_latest_stage(model: SpeechModel) -> None:
    log: list[str] = []
    stages = [Counting("a", log, 3, 1), Counting("b", log, 2), Counting("c", log, 3, 0.5)]
    pipeline = Pipeline(Engine(model.talker.decoder, slots=2), stages)
    while pipeline.unfinished:
        pipeline.step()
    assert log == ["c", "a", "b", "c", "a"]


@pytest.mark.parametrize(
    ("utterance", "where"),
    [
        (Utterance(""), "input"),
        (Utterance("x" * 300), "input"),
        (Utterance("x" * 100_000), "input"),
        (Utterance("hi", speaker="bob"), "voice"),
        (Utterance("hi", language="klingon"), "language"),
    ],
)
def test_invalid_utterances_are_refused(model: SpeechModel, utterance: Utterance, where: str) -> None:
    with pytest.raises(RequestError) as refused:
        Speaker(model).request(utterance, seed=0)
    assert refused.value.where == where


def test_say_works_after_an_invalid_utterance(model: SpeechModel) -> None:
    speaker = Speaker(model)
    expected = speaker.say(UTTERANCES[:1])
    with pytest.raises(RequestError, match="empty"):
        speaker.say([UTTERANCES[0], Utterance("")])
    assert np.array_equal(speaker.say(UTTERANCES[:1]), expected)


def test_only_the_torch_runner_takes_input_embeddings(model: SpeechModel) -> None:
    speaker = Speaker(model)
    request = speaker.request(UTTERANCES[0], seed=0)
    with pytest.raises(RequestError, match="input embeddings"):
        Engine(model.talker.decoder, runner=lambda decoder, blocks: object()).add(request)  # type: ignore[arg-type, return-value]
