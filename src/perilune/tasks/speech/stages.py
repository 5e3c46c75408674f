"""The speech stages: a teacher's utterances, a codec, a voice, and its evaluation with a recognizer."""

from collections.abc import Callable, Mapping
from typing import Annotated, Literal

from pydantic import Field

from perilune.bundle.job import Job
from perilune.bundle.plugin import Consumes
from perilune.errors import RequestError
from perilune.frozen import Frozen
from perilune.plural import plural
from perilune.tasks.stage.retention import Keep, KeepNewest, TrainingSpec
from perilune.tasks.stage.stage import Stage

Kind = Literal["digits", "numbers", "sentences"]


class FitSettings(Frozen):
    """AdamW with a warm-up and a cosine decay to a twentieth."""

    lr: float = Field(2e-3, gt=0, le=10, description="peak learning rate")
    warmup: int = Field(20, ge=1, description="steps of linear warm-up")
    batch: int = Field(24, ge=1, description="crops (speech_codec) or utterances (speech_voice) per step")


class UtterancesSpec(Frozen):
    """Fields of an utterances stage."""

    kinds: tuple[Kind, ...] = Field(("digits",), min_length=1, description="kinds of texts, in equal shares")
    train: int = Field(600, ge=2, le=100_000, description="utterances to train on")
    held_out: int = Field(
        60, ge=2, le=10_000, description="utterances to evaluate on; no text is in both sets"
    )
    voice: str = Field("en-us+klatt", description="voice and variant of espeak-ng")
    speed: int = Field(150, ge=80, le=450, description="speaking rate, in words per minute")


class CodecSpec(TrainingSpec):
    """Fields of a speech_codec stage."""

    data: Annotated[str, Consumes("utterances")] = Field(description="stage whose utterances to encode")
    steps: int = Field(450, ge=2, description="training steps")
    keep: KeepNewest = Field(Keep(), description="which checkpoints to keep")
    codebooks: int = Field(
        4, ge=2, le=32, description="number of codebooks, which is the number of codes per frame"
    )
    codebook_size: int = Field(128, ge=2, le=4096, description="entries of each codebook")
    width: int = Field(96, ge=8, multiple_of=4, description="channels of the decoder")
    frames: int = Field(16, ge=4, description="length of a training crop, in frames of 80 ms")
    components: int = Field(
        64,
        ge=2,
        le=320,
        description="principal components to which the encoder reduces a frame's spectrogram",
    )
    learning: FitSettings = Field(FitSettings(lr=4e-3, batch=4), description="optimizer and batch")


class VoiceSpec(TrainingSpec):
    """Fields of a speech_voice stage."""

    data: Annotated[str, Consumes("utterances")] = Field(description="stage whose utterances to imitate")
    codec: Annotated[str, Consumes("codec")] = Field(
        description="stage whose codec turns the codes into audio"
    )
    steps: int = Field(1000, ge=1, description="training steps")
    keep: KeepNewest = Field(Keep(), description="which checkpoints to keep")
    width: int = Field(128, ge=32, multiple_of=32, description="hidden size of the talker")
    layers: int = Field(3, ge=1, description="layers of the talker")
    predictor_width: int = Field(64, ge=32, multiple_of=32, description="hidden size of the code predictor")
    predictor_layers: int = Field(2, ge=1, description="layers of the code predictor")
    shifts: int = Field(
        4, ge=1, le=16, description="copies of each utterance, shifted by different fractions of a frame"
    )
    temperature: float = Field(0.0, ge=0, description="default sampling temperature of the voice; 0: greedy")
    learning: FitSettings = Field(
        FitSettings(lr=3e-3, warmup=30, batch=16), description="optimizer and batch"
    )


class HearingSpec(Frozen):
    """Fields of a speech_evaluation stage."""

    voice: Annotated[str, Consumes("voice")] = Field(description="stage whose voice to evaluate")
    data: Annotated[str, Consumes("utterances")] = Field(
        description="stage whose held-out texts the voice speaks"
    )
    utterances: int | None = Field(None, ge=2, description="number of held-out utterances; null: all")
    language_model: bool = Field(
        False,
        description="transcribe a second time, with the recognizer's own language model of English; slow",
    )


class Utterances(Stage[UtterancesSpec]):
    """Synthesizes texts with espeak-ng."""

    name = "utterances"
    spec = UtterancesSpec
    loop = "perilune.tasks.speech.utterances"
    produces = "utterances"
    output = "artifacts/utterances"
    standalone = True

    def describe(self, spec: UtterancesSpec, job: Job) -> Mapping[str, object]:
        from perilune.speech.espeak import require_espeak

        texts = f"{spec.train} to train on, {spec.held_out} held out: {', '.join(spec.kinds)}"
        teacher = f"espeak-ng {spec.voice}, {spec.speed} words a minute"
        return {"texts": texts, "teacher": teacher, **_missing_program(require_espeak)}


class SpeechCodec(Stage[CodecSpec]):
    """Fits a codec to utterances."""

    name = "speech_codec"
    spec = CodecSpec
    loop = "perilune.tasks.speech.codec"
    produces = "codec"
    standalone = True

    def describe(self, spec: CodecSpec, job: Job) -> Mapping[str, object]:
        codes = f"{spec.codebooks} of {spec.codebook_size} a frame of 80 ms"
        learning = spec.learning
        return {
            "codes": codes,
            "training": f"{plural(spec.steps, 'step')} x {plural(learning.batch, 'crop')}"
            f" of {plural(spec.frames, 'frame')}",
            "learning rate": f"{learning.lr:g} after {learning.warmup} steps, cosine",
        }


class SpeechVoice(Stage[VoiceSpec]):
    """Trains a talker and a code predictor on utterances."""

    name = "speech_voice"
    spec = VoiceSpec
    loop = "perilune.tasks.speech.voice"
    produces = "voice"
    standalone = True

    def describe(self, spec: VoiceSpec, job: Job) -> Mapping[str, object]:
        learning = spec.learning
        return {
            "talker": f"{spec.layers} layers of width {spec.width}",
            "code predictor": f"{spec.predictor_layers} layers of width {spec.predictor_width}",
            "training": f"{plural(spec.steps, 'step')} x {plural(learning.batch, 'utterance')}",
            "learning rate": f"{learning.lr:g} after {learning.warmup} steps, cosine",
        }


class SpeechEvaluation(Stage[HearingSpec]):
    """Measures the word error rate of a voice with a recognizer."""

    name = "speech_evaluation"
    spec = HearingSpec
    loop = "perilune.tasks.speech.hearing"
    produces = "evaluation"
    output = "artifacts/summary.json"
    standalone = True

    def describe(self, spec: HearingSpec, job: Job) -> Mapping[str, object]:
        from perilune.speech.recognizer import require_recognizer

        count = "all" if spec.utterances is None else str(spec.utterances)
        text = f"{count} held out, each by teacher, codec and voice"
        return {"utterances": text, **_missing_program(require_recognizer)}


def _missing_program(require: Callable[[], None]) -> dict[str, str]:
    """Return a warning if this machine lacks a program; another machine may run the stage."""
    try:
        require()
    except RequestError as error:
        return {"warning": f"{error.what} here; {error.remedy}"}
    return {}


utterances = Utterances()
codec = SpeechCodec()
voice = SpeechVoice()
hearing = SpeechEvaluation()
