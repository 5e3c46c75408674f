"""Speech recognition with pocketsphinx, which no voice here is trained on, and word error rates.

The package includes its acoustic model, dictionary and language model (optional extra `speech`).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perilune.errors import RequestError

Samples = NDArray[np.float32]
SAMPLE_RATE = 16_000
# With the default of 0.65 and a grammar of digits, the recognizer inserts words into the teacher's speech: 4
# to 13% of the digits. With 1e-4 and a klatt voice, it made no error in 118 digits.
_WORD_PENALTY = 1e-4
_PEAK = 0.5  # amplitude to which speech is scaled, of at most 1
_MARGIN = 0.3  # seconds of silence on both sides
_HISS = 1e-3  # amplitude of added noise, because the recognizer's noise estimate fails on digital silence


class Recognizer:
    """Transcribes English speech at 16 kHz.

    Args:
        words: the words to recognize, in any order. If empty, the package's language model is used.

    Raises:
        RequestError: when pocketsphinx is not installed, or does not know a word.
    """

    def __init__(self, words: Iterable[str] = ()) -> None:
        require_recognizer()
        from pocketsphinx import Decoder

        words = sorted(set(words))
        quiet = {"samprate": SAMPLE_RATE, "loglevel": "FATAL", "cmn": "batch"}
        if not words:
            self._decoder: Any = Decoder(**quiet)
            return
        self._decoder = Decoder(**quiet, lm=None, wip=_WORD_PENALTY)
        if unknown := [word for word in words if self._decoder.lookup_word(word) is None]:
            raise RequestError(
                f"pocketsphinx has no pronunciation of {', '.join(unknown[:5])}",
                where="recognizer",
                remedy="spell numbers as words, in lower case",
            )
        self._decoder.add_jsgf_string("words", f"#JSGF V1.0;\ngrammar g;\npublic <g> = ({'|'.join(words)})+;")
        self._decoder.activate_search("words")

    def hear(self, samples: Samples) -> str:
        """Return the words in float32[N] samples; "" for silence."""
        silence = np.zeros(int(_MARGIN * SAMPLE_RATE))
        loudest = float(np.abs(samples).max()) if len(samples) else 0.0
        audio = np.concatenate([silence, samples * (_PEAK / max(loudest, 1e-9)), silence])
        audio = audio + np.random.default_rng(0).normal(size=len(audio)) * _HISS
        self._decoder.start_utt()
        self._decoder.process_raw((audio.clip(-1, 1) * 32767).astype("<i2").tobytes(), full_utt=True)
        self._decoder.end_utt()
        hypothesis = self._decoder.hyp()
        return "" if hypothesis is None else str(hypothesis.hypstr)


def require_recognizer() -> None:
    try:
        import pocketsphinx  # noqa: F401
    except ImportError:
        raise RequestError(
            "pocketsphinx is not installed", where="recognizer", remedy='pip install "perilune[speech]"'
        ) from None


def count_word_errors(said: Sequence[str], heard: Sequence[str]) -> int:
    """Return the smallest number of substituted, inserted and deleted words (Levenshtein)."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(said, start=1):
        above, row[0] = row[:], i
        for j, other in enumerate(heard, start=1):
            row[j] = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (word != other))
    return row[-1]
