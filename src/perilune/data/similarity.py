"""When two texts say almost the same, and when one has been seen in an evaluation."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from perilune.errors import RequestError

PERMUTATIONS = 64
SHINGLE = 5  # characters


def words_of(text: str) -> list[str]:
    """Lower-case words and numbers, without accents' variants, punctuation or layout."""
    return re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())


def signature_of(text: str) -> NDArray[np.uint32]:
    """MinHash signature uint32[64] of the text's runs of five characters (case and layout do not count).

    Broder, "On the resemblance and containment of documents", 1997; computed by datasketch.

    Raises:
        RequestError: when datasketch is not installed.
    """
    MinHash = _package("datasketch").MinHash
    plain = " ".join(words_of(text)) or text
    shingles = {plain[start : start + SHINGLE] for start in range(max(1, len(plain) - SHINGLE + 1))}
    minhash = MinHash(num_perm=PERMUTATIONS, seed=1, hashfunc=crc32)
    minhash.update_batch([shingle.encode() for shingle in sorted(shingles)])
    return np.asarray(minhash.hashvalues, dtype=np.uint32)


def language_of(text: str) -> str:
    """ISO code of the language that a text is likely in, "und" for one without letters.

    Raises:
        RequestError: when py3langid is not installed.
    """
    if not any(map(str.isalpha, text)):
        return "und"
    return str(_package("py3langid").classify(text)[0])


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise RequestError(
            f"this needs the package {error.name}", remedy="pip install 'perilune[data]'"
        ) from None


class Contamination:
    """What evaluations ask, so that training data can be kept clear of it.

    Args:
        ngram: words in a row that, found in both, are no accident.
    """

    def __init__(self, ngram: int = 13) -> None:
        self._ngram = ngram
        self._prompts: set[bytes] = set()
        self._runs: dict[bytes, str] = {}

    def add(self, prompt: str, answer: str) -> None:
        """Take in one item of an evaluation."""
        self._prompts.add(_hash(words_of(prompt)))
        for run in self._runs_of(f"{prompt} {answer}"):
            self._runs.setdefault(_hash(run), " ".join(run))

    def found_in(self, prompt: str, answer: str) -> str | None:
        """What of an evaluation stands in a record: its prompt, or a run of words; None when clean."""
        if _hash(words_of(prompt)) in self._prompts:
            return "the same prompt"
        for run in self._runs_of(f"{prompt} {answer}"):
            if (known := self._runs.get(_hash(run))) is not None:
                return f"the same {self._ngram} words: {known!r}"
        return None

    def _runs_of(self, text: str) -> Iterable[Sequence[str]]:
        words = words_of(text)
        return (words[start : start + self._ngram] for start in range(len(words) - self._ngram + 1))


def _hash(words: Sequence[str]) -> bytes:
    return hashlib.blake2b("\0".join(words).encode(), digest_size=12).digest()
