"""Near duplicates, languages, and contamination with evaluations."""

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Sequence
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from perilune.errors import requires_extra

PERMUTATIONS = 64
SHINGLE_CHARACTERS = 5
_SIGNS = str.maketrans("−×·÷", "-**/")
_OPERATOR = r"(?:\*\*|[-+*/^%=<>])"
_OPERAND = r"[-(\[]*(?:\d|[b-hj-z]\b)"  # a number, or a variable; "a" and "i" are words
_WORDS = re.compile(
    r"\w+"
    rf"|(?<=[\w)\]])(?<![^\W\d_]{{2}}){_OPERATOR}(?={_OPERAND})"  # 3+4, but neither held-out nor GPT-4
    rf"|(?<=[\w)\]] ){_OPERATOR}(?= {_OPERAND})"  # 3 + 4, but neither bullets nor *emphasis*
    r"|(?<!\w)-(?=\d)"
)


def split_words(text: str) -> list[str]:
    """Return lower-case words, numbers and arithmetic operators in Unicode normal form NFKC."""
    plain = unicodedata.normalize("NFKC", text).casefold().translate(_SIGNS)
    return _WORDS.findall(re.sub(r"[^\S\n]+", " ", plain))


def minhash_signature(text: str) -> NDArray[np.uint32]:
    """Return the MinHash signature uint32[64] of a text's five-character shingles; ignores case and layout.

    Broder, "On the resemblance and containment of documents", 1997; computed by datasketch.

    Raises:
        RequestError: when datasketch is not installed.
    """
    with requires_extra("data", "the package datasketch is required"):
        from datasketch import MinHash
    plain = " ".join(split_words(text)) or text
    shingles = {
        plain[start : start + SHINGLE_CHARACTERS]
        for start in range(max(1, len(plain) - SHINGLE_CHARACTERS + 1))
    }
    minhash = MinHash(num_perm=PERMUTATIONS, seed=1, hashfunc=crc32)
    minhash.update_batch([shingle.encode() for shingle in sorted(shingles)])
    return np.asarray(minhash.hashvalues, dtype=np.uint32)


def detect_language(text: str) -> str:
    """Return the ISO code of the most likely language of a text, "und" for a text without letters.

    Raises:
        RequestError: when py3langid is not installed.
    """
    if not any(map(str.isalpha, text)):
        return "und"
    with requires_extra("data", "the package py3langid is required"):
        import py3langid
    return str(py3langid.classify(text)[0])


class Contamination:
    """Prompts and n-grams of evaluations, to find contaminated training data.

    Args:
        ngram: number of consecutive words that counts as contamination.
    """

    def __init__(self, ngram: int = 13) -> None:
        self._ngram = ngram
        self._prompts: set[bytes] = set()
        self._ngrams: dict[bytes, str] = {}

    def add(self, prompt: str, answer: str) -> None:
        """Add one item of an evaluation."""
        self._prompts.add(_hash_words(split_words(prompt)))
        for words in self._ngrams_of(f"{prompt} {answer}"):
            self._ngrams.setdefault(_hash_words(words), " ".join(words))

    def found_in(self, prompt: str, answer: str) -> str | None:
        """Return the contamination of a record (the same prompt, or an n-gram), or None."""
        if _hash_words(split_words(prompt)) in self._prompts:
            return "the same prompt"
        for words in self._ngrams_of(f"{prompt} {answer}"):
            if (known := self._ngrams.get(_hash_words(words))) is not None:
                return f"the same {self._ngram} words: {known!r}"
        return None

    def _ngrams_of(self, text: str) -> Iterable[Sequence[str]]:
        words = split_words(text)
        return (words[start : start + self._ngram] for start in range(len(words) - self._ngram + 1))


def _hash_words(words: Sequence[str]) -> bytes:
    return hashlib.blake2b("\0".join(words).encode(), digest_size=12).digest()
