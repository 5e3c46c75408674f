"""The teacher's utterances, which one stage writes and the others read.

utterances.jsonl   one {"text", "kind", "split", "start", "samples"} a line
audio.npy          int16, the samples of all utterances end to end, at 16 kHz
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from perilune.bundle.workspace import Workspace
from perilune.environments.core.protocol import Split
from perilune.errors import RequestError
from perilune.files import read_json_lines, write_json_lines
from perilune.speech.espeak import synthesize_text
from perilune.speech.recognizer import SAMPLE_RATE
from perilune.speech.stream import Samples
from perilune.tasks.speech.stages import Kind, UtterancesSpec
from perilune.tasks.speech.texts import draw_texts, kind_of

_LINES, _AUDIO = "utterances.jsonl", "audio.npy"
_PEAK = 0.7


@dataclass(frozen=True, slots=True, eq=False)
class SpokenText:
    """A text and the teacher's speech of it.

    Attributes:
        samples: float32[N] in [-1, 1], at 16 kHz.
    """

    text: str
    kind: Kind
    split: Split
    samples: Samples


def run(workspace: Workspace, spec: UtterancesSpec) -> dict[str, Any]:
    """Synthesize all texts with the teacher, and write the utterances."""
    seed = workspace.job.seed
    texts: list[tuple[Split, str]] = [
        ("train", text) for text in draw_texts(spec.kinds, "train", spec.train, seed)
    ]
    texts += [("heldout", text) for text in draw_texts(spec.kinds, "heldout", spec.held_out, seed)]
    audio: list[Samples] = []
    for done, (_, text) in enumerate(texts, start=1):
        audio.append(synthesize_text(text, voice=spec.voice, speed=spec.speed, sample_rate=SAMPLE_RATE))
        workspace.progress(done, len(texts), "utterances")
    loudest = max(float(np.abs(clip).max()) for clip in audio)
    if not loudest:
        raise RequestError("the teacher's speech is silent", where="voice")
    folder = workspace.root / "artifacts" / "utterances"
    folder.mkdir(parents=True, exist_ok=True)
    starts = np.cumsum([0, *map(len, audio)])
    np.save(folder / _AUDIO, np.rint(np.concatenate(audio) * (_PEAK / loudest * 32767)).astype("<i2"))
    write_json_lines(
        folder / _LINES,
        [
            {"text": text, "kind": kind_of(text), "split": split, "start": int(start), "samples": len(clip)}
            for (split, text), start, clip in zip(texts, starts[:-1], audio, strict=True)
        ],
    )
    seconds = float(starts[-1]) / SAMPLE_RATE
    workspace.metric(1, utterances=len(texts), seconds=seconds)
    return {
        "kind": "utterances",
        "utterances": spec.train,
        "held_out_utterances": spec.held_out,
        "seconds": seconds,
    }


def read_utterances(folder: Path, split: Split) -> list[SpokenText]:
    """Return the utterances of a split.

    Raises:
        RequestError: when a file is missing or malformed.
    """
    try:
        audio = np.load(folder / _AUDIO, mmap_mode="r", allow_pickle=False)
        return [
            SpokenText(
                str(line["text"]),
                cast(Kind, line["kind"]),
                split,
                audio[line["start"] : line["start"] + line["samples"]].astype(np.float32) / 32767,
            )
            for line in read_json_lines(folder / _LINES)
            if line["split"] == split
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"not a folder of utterances: {error}", where=str(folder)) from None
