"""The speech stages: a teacher's utterances, a codec, a voice, and its evaluation with a recognizer."""

from collections.abc import Callable, Mapping

from perilune.bundle.job import Job
from perilune.errors import RequestError
from perilune.plural import plural
from perilune.tasks.speech.specs import CodecSpec, HearingSpec, UtterancesSpec, VoiceSpec
from perilune.tasks.stage.stage import Stage


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
