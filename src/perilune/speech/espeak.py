"""Text to speech with espeak-ng, the teacher. The program runs without a shell and reads text from stdin."""

import io
import re
import shutil
import subprocess
import wave

import numpy as np
from numpy.typing import NDArray

from perilune.errors import RequestError, WorkFailedError

Samples = NDArray[np.float32]
PROGRAM = "espeak-ng"
MAX_CHARACTERS = 500
_TIMEOUT_S = 30.0
_VOICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+-]{0,40}")
_TEXT = re.compile(r"[A-Za-z0-9 ,.?!'-]+")


def require_espeak() -> None:
    if shutil.which(PROGRAM) is None:
        remedy = "apt-get install espeak-ng, or brew install espeak-ng"
        raise RequestError(f"{PROGRAM} is not installed", where="teacher", remedy=remedy)


def synthesize_text(text: str, *, voice: str, speed: int, sample_rate: int) -> Samples:
    """Synthesize `text` as float32[N] in [-1, 1]. Equal arguments give equal samples.

    Args:
        voice: a voice and a variant, such as "en-us+klatt".
        speed: words per minute.

    Raises:
        RequestError: when the voice is malformed or unknown, or the text has characters other than letters,
            digits, spaces and simple punctuation, which espeak-ng could take for commands or phonemes.
        WorkFailedError: when espeak-ng fails.
    """
    if not _VOICE.fullmatch(voice):
        raise RequestError(f"{voice!r} is not the name of a voice", where="voice")
    if not _TEXT.fullmatch(text) or len(text) > MAX_CHARACTERS:
        raise RequestError(
            f"the teacher cannot say {text[:60]!r}",
            where="text",
            remedy=f"use letters, digits, spaces, simple punctuation; at most {MAX_CHARACTERS} characters",
        )
    require_espeak()
    command = [PROGRAM, "--stdin", "--stdout", "-v", voice, "-s", str(speed)]
    try:
        process = subprocess.run(
            command, input=text.encode(), capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise WorkFailedError(f"no answer within {_TIMEOUT_S:g} seconds", where=PROGRAM) from None
    if process.returncode or not process.stdout.startswith(b"RIFF"):
        message = process.stderr.decode(errors="replace").strip()[:200] or f"exit code {process.returncode}"
        raise RequestError(message, where=f"{PROGRAM} -v {voice}", remedy="espeak-ng --voices lists voices")
    return _resample(process.stdout, sample_rate)


def _resample(audio: bytes, sample_rate: int) -> Samples:
    """Return the samples of a WAV file at another rate, by truncating or zero-padding the spectrum."""
    with wave.open(io.BytesIO(audio)) as file:
        rate, raw = file.getframerate(), file.readframes(len(audio))  # the header of a stream has no length
    samples = np.frombuffer(raw, "<i2").astype(np.float64) / 32768
    length = round(len(samples) * sample_rate / rate)
    spectrum = np.fft.rfft(samples)[: length // 2 + 1]
    resampled: Samples = np.fft.irfft(spectrum, length).astype(np.float32)
    return resampled * np.float32(length / max(len(samples), 1))
