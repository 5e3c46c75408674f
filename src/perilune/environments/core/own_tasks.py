"""The tasks of an environment in a user's file, with errors that name the line."""

import json
import traceback
from collections.abc import Callable, Iterable, Iterator

from perilune.environments.core.protocol import Split, Task
from perilune.errors import RequestError


def wrap_user_tasks(
    tasks: Callable[[Split, int], Iterable[Task]], name: str
) -> Callable[[Split, int], Iterator[Task]]:
    """Wrap the method `tasks` of a user's file, so that its errors name the line.

    Raises:
        RequestError: when it raises, or yields anything but a Task.
    """
    file = name.rpartition(":")[0]

    def wrapped(split: Split, seed: int) -> Iterator[Task]:
        try:
            for task in tasks(split, seed):
                if not isinstance(task, Task):
                    raise TypeError(f"tasks yields {type(task).__name__}, not Task")
                json.dumps(dict(task.data))
                yield task
        except RequestError:
            raise
        except Exception as error:
            frames = reversed(traceback.extract_tb(error.__traceback__))
            line = next((f":{frame.lineno}" for frame in frames if frame.filename == file), "")
            raise RequestError(
                f"{name} cannot make tasks: {type(error).__name__}: {error}",
                where=f"{file}{line}",
                remedy="tasks(self, split, seed) yields Task(task_id, messages, data), with JSON data",
            ) from error

    return wrapped
