"""Word error rates of a voice on held-out texts, beside those of the teacher and of the codec alone.

    teacher   the teacher's speech: the errors of the recognizer
    codec     the teacher's speech, encoded and decoded: adds the losses of the codec
    voice     the text, spoken by the trained model: adds the errors of the talker

The three were not trained with the recognizer, and the recognizer was not trained on them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perilune.bundle.workspace import Workspace
from perilune.files import write_json_lines
from perilune.learn.checkpoints import copy_into
from perilune.metrics.bootstrap import bootstrap_ratio
from perilune.models.checkpoints.folder import CheckpointFolder
from perilune.models.checkpoints.tensors import read_tensor_headers, read_tensors
from perilune.rollout.timing import Stopwatch
from perilune.speech.codec_encoder import CodecEncoder, encode
from perilune.speech.folder import CODEC_FOLDER, SpeechModel, load_speech_model
from perilune.speech.prompt import Utterance
from perilune.speech.recognizer import SAMPLE_RATE, Recognizer, count_word_errors, require_recognizer
from perilune.speech.stream import Samples
from perilune.speech.synthesis import Speaker
from perilune.tasks.speech.stages import HearingSpec
from perilune.tasks.speech.texts import words_of
from perilune.tasks.speech.utterances import SpokenText, read_utterances
from perilune.tasks.stage.policy import prepare_device

_ENCODER = "encoder."


def run(workspace: Workspace, spec: HearingSpec) -> dict[str, Any]:
    """Speak the held-out texts, transcribe them, and return the error rates by kind and speaker."""
    require_recognizer()
    prepare_device(workspace)
    folder, watch = workspace.input("voice"), Stopwatch()
    model = load_speech_model(folder)
    texts = read_utterances(workspace.input("data"), "heldout")[: spec.utterances]
    audio = {
        "teacher": [utterance.samples for utterance in texts],
        "codec": _through_codec(load_encoder(folder, model), model, texts),
        "voice": Speaker(model).say([Utterance(utterance.text) for utterance in texts], workspace.job.seed),
    }
    spoken = watch.elapsed
    vocabularies = ["own words", "language model"] if spec.language_model else ["own words"]
    rows: list[dict[str, Any]] = []
    for kind in sorted({utterance.kind for utterance in texts}):
        for vocabulary in vocabularies:
            recognizer = Recognizer(words_of([kind]) if vocabulary == "own words" else ())
            for i, utterance in enumerate(texts):
                if utterance.kind == kind:
                    rows += _transcribe(i, utterance, vocabulary, recognizer, audio)
                    workspace.progress(len(rows), 3 * len(texts) * len(vocabularies), "utterances")
    write_json_lines(workspace.root / "artifacts" / "heard.jsonl", rows)
    rates = _rates(rows, workspace.job.seed)
    workspace.metric(1, **{name.replace(" ", "_"): rate["mean"] for name, rate in rates.items()})
    workspace.timing(1, speaking=spoken, hearing=watch.elapsed - spoken)
    seconds = {name: sum(map(len, clips)) / SAMPLE_RATE for name, clips in audio.items()}
    return {"kind": "speech", "utterances": len(texts), "seconds": seconds, "word_error_rates": rates}


def load_encoder(folder: Path, model: SpeechModel) -> CodecEncoder:
    """Return the codec encoder that `speech_voice` keeps beside the decoder.

    Raises:
        RequestError: when the folder has none, or one of another shape.
    """
    encoder = CodecEncoder(model.config.codec)
    stored = read_tensor_headers(CheckpointFolder(folder / CODEC_FOLDER))
    tensors = read_tensors([header for name, header in stored.items() if name.startswith(_ENCODER)])
    loaded = {name.removeprefix(_ENCODER): tensor for name, tensor in tensors}
    copy_into(encoder.state_dict(), loaded, folder / CODEC_FOLDER)
    return encoder


@torch.inference_mode()
def _through_codec(
    encoder: CodecEncoder, model: SpeechModel, utterances: Sequence[SpokenText]
) -> list[Samples]:
    def both_ways(samples: Tensor) -> Tensor:
        return model.codec(encode(encoder, model.codec, samples)[None])[0]  # type: ignore[no-any-return]

    return [both_ways(torch.from_numpy(utterance.samples)).numpy() for utterance in utterances]


def _transcribe(
    index: int,
    one: SpokenText,
    vocabulary: str,
    recognizer: Recognizer,
    audio: Mapping[str, Sequence[Samples]],
) -> list[dict[str, Any]]:
    """Return one row for each speaker."""
    words = one.text.split()
    rows = []
    for speaker, clips in audio.items():
        heard = recognizer.hear(clips[index])
        rows.append(
            {
                "kind": one.kind,
                "vocabulary": vocabulary,
                "speaker": speaker,
                "text": one.text,
                "heard": heard,
                "words": len(words),
                "errors": count_word_errors(words, heard.split()),
            }
        )
    return rows


def _rates(rows: Sequence[Mapping[str, Any]], seed: int) -> dict[str, dict[str, float]]:
    """Return word error rates by "kind, vocabulary, speaker", with intervals over utterances."""
    rates = {}
    for name in dict.fromkeys(map(_group, rows)):
        own = [row for row in rows if _group(row) == name]
        rate = bootstrap_ratio([row["errors"] for row in own], [row["words"] for row in own], seed=seed)
        rates[name] = {**rate._asdict(), "words": sum(row["words"] for row in own), "utterances": len(own)}
    return rates


def _group(row: Mapping[str, Any]) -> str:
    return f"{row['kind']}, {row['vocabulary']}, {row['speaker']}"
