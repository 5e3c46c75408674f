"""The schedule log: the groups that each step trained on, and the versions that sampled their tokens.

The log and the seed determine an asynchronous run. A run writes the log; `perilune reproduce` follows it.

    {"step": 12, "groups": [[40, [[[10, 5], [11, 9]], [[11, 3]]]], ...]}

Each entry of "groups" is the number of a group in the order of admission, and for each of its samples the
versions with their numbers of tokens.
"""

from pathlib import Path

from perilune.errors import RequestError
from perilune.files import append_json_line, read_json_lines
from perilune.rollout.continuous import VersionRuns

Batch = dict[int, list[VersionRuns]]
"""The groups of one step by number, in order, with the version runs of each sample."""


def log_batch(path: Path, step: int, batch: Batch) -> None:
    append_json_line(path, {"step": step, "groups": list(batch.items())})


def read_schedule(path: Path) -> dict[int, Batch]:
    """Return the batches by step.

    Raises:
        RequestError: when the file is not a schedule log.
    """
    try:
        return {
            int(line["step"]): {
                int(number): [[(int(version), int(count)) for version, count in runs] for runs in samples]
                for number, samples in line["groups"]
            }
            for line in read_json_lines(path)
        }
    except (KeyError, TypeError, ValueError) as error:
        raise RequestError(f"not a schedule log: {error}", where=str(path)) from None
