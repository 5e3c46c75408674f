"""Measure the word error rate of a recognizer on a small voice trained in minutes.

    python benchmarks/speech_voice.py --seeds 0 1 2

Runs the bundled recipe speech/digits: espeak-ng speaks digits, a codec is fitted to its speech, a talker
learns to predict the codec's codes for a text, and pocketsphinx transcribes held-out texts spoken by the
teacher, by the teacher through the codec, and by the voice. Writes results/speech_voice.json.
"""

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perilune.files import read_json_lines
from perilune.recipe.load import bundled_recipe
from recipe_runs import document, for_seeds, options, run_recipe, write

ABOUT = """\
espeak-ng (the *teacher*) speaks digits in a synthetic voice. Perilune fits a codec to 4,000 utterances of it.
It then trains a small talker with a code predictor, in the layout of Qwen3-TTS, to predict the codec's codes
for a text. The recognizer pocketsphinx, which was trained on neither voice, transcribes 60 held-out texts.
Its grammar allows the ten digits in any order.

The row *teacher* is the recognizer's error on espeak-ng itself. The row *codec* adds the loss of encoding and
decoding, and the row *voice* adds the errors of the talker. Intervals are over resampled utterances. We chose
the recognizer's word insertion penalty and the teacher's voice and speed on other speech of the teacher.
CPU seconds, codec and voice describe seed 0. The CPU seconds come from a run of seed 0 alone."""
SPEAKERS = ("teacher", "codec", "voice")


def main() -> None:
    parser = options(__doc__, "speech_voice")
    arguments = parser.parse_args()
    began = time.monotonic()
    recipe = bundled_recipe("speech/digits")

    def run(seed: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="perilune-benchmark-") as home:
            stages = run_recipe(recipe, seed, home=Path(home))
            return stages | {
                "cpu_seconds": {stage: cpu_seconds(stages[stage]) for stage in ("codec", "voice")}
            }

    runs = for_seeds(run, arguments.seeds, arguments.jobs)
    rows = [row for seed, run in zip(arguments.seeds, runs, strict=True) for row in rates(seed, run)]
    command = ["--seeds", *map(str, arguments.seeds)]
    write(arguments.out, result(rows, runs[0], document("speech_voice.py", command, began)))


def rates(seed: int, run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A table row for each speaker."""
    errors = run["heard"]["summary"]["word_error_rates"]
    return [
        {
            "seed": seed,
            "speaker": speaker,
            "word error rate": {key: rate[key] for key in ("mean", "low", "high")},
            "words": rate["words"],
        }
        for speaker in SPEAKERS
        for name, rate in errors.items()
        if name.endswith(speaker)
    ]


def result(rows: list[dict[str, Any]], run: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, Any]:
    """The document of the page."""
    codec, voice = run["codec"]["summary"], run["voice"]["summary"]
    return {
        "title": "Word error rate of a small voice trained in minutes",
        "about": ABOUT,
        "word_error_rates": rows,
        "codec": {
            key: codec[key] for key in ("frames_per_second", "bits_per_second", "decoder_parameters", "steps")
        },
        "voice": {
            key: voice[key] for key in ("parameters", "predictor_parameters", "steps", "first_code_loss")
        },
        "cpu_seconds": run["cpu_seconds"],
        **made,
    }


def cpu_seconds(stage: Mapping[str, Any]) -> float:
    """CPU seconds of all steps of a stage."""
    lines = read_json_lines(stage["folder"] / "artifacts" / "timings.jsonl")
    return round(sum(line["processor"] for line in lines), 1)


if __name__ == "__main__":
    main()
