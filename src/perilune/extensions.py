"""User code that a recipe names: an entry point of a package, module:name, or file.py:name.

The text of a file is frozen into the bundle as `source`, next to the name. User code runs in the process that
needs it, with the rights of that process, like the code of an installed package. Reward functions are the
exception: only the confined scorer loads them (`perilune.environments.core.rewards`).
"""

import hashlib
import re
import sys
import traceback
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from pydantic import Field

from perilune.errors import RequestError
from perilune.frozen import Frozen

ALGORITHM_GROUP = "perilune.algorithms"
CODE_SCHEMA = {"type": "string", "format": "file.py:name", "pattern": r"\.py:"}  # JSON schema
METRIC_GROUP = "perilune.metrics"
REWARD_GROUP = "perilune.rewards"
TEACHER_GROUP = "perilune.teachers"

INSTALL_REMEDY = (
    "install that package into Perilune's environment; only the named file becomes part of the bundle, so it"
    " cannot import files next to it"
)

_FILE = re.compile(r"[^:]+\.py:[A-Za-z_]\w*")


class CodeFile(Frozen):
    """The section that replaces file.py:name in a loaded recipe."""

    name: str = Field(pattern=_FILE.pattern, description="file.py:name, relative to the recipe")
    source: str | None = Field(None, description="text of the file; filled in when the recipe is loaded")


@dataclass(frozen=True, slots=True)
class CodeReference:
    """Marks a field of a spec that names user code, by itself or as the key `name` of a section.

    When a recipe is loaded, file.py:name becomes a section with `name` and `source`.

    Attributes:
        many: the field is a mapping of such values.
    """

    many: bool = False


def is_file_reference(reference: object) -> bool:
    """Return whether a value of a recipe is file.py:name."""
    return isinstance(reference, str) and _FILE.fullmatch(reference) is not None


def load_extension(reference: str, source: str | None, group: str, where: str) -> Any:
    """Import the object that `reference` names.

    Args:
        source: text of the file, if it names a file.
        group: entry-point group in which a name without a colon is looked up.
        where: key of the recipe, for errors.

    Raises:
        RequestError: when loading fails. The message has the cause and the line of the file.
    """
    file, _, name = reference.rpartition(":")
    try:
        if is_file_reference(reference):
            if source is None:
                what = f"the text of {file} is missing"
                raise RequestError(what, where=where, remedy="name the file in a recipe")
            return getattr(_execute_file(file, source), name)
        if file:
            return getattr(import_module(file), name)
        return load_entry_point(group, reference)
    except (RequestError, KeyboardInterrupt):
        raise
    except BaseException as error:  # user code may even exit
        line = next((f":{f.lineno}" for f in reversed(_stack_frames(error)) if f.filename == file), "")
        raise RequestError(
            f"cannot load {file or reference}{line}: {type(error).__name__}: {error}",
            where=where,
            remedy=INSTALL_REMEDY if isinstance(error, ModuleNotFoundError) else "",
        ) from None


def load_entry_point(group: str, name: str) -> Any:
    """Load the object that an installed package registers as `name`.

    Raises:
        LookupError: when no package or several packages register it.
    """
    points = tuple(entry_points(group=group, name=name))
    if len(points) != 1:
        raise LookupError(f"{len(points) or 'no'} installed packages register '{name}' in {group}")
    return points[0].load()


def _stack_frames(error: BaseException) -> list[traceback.FrameSummary]:
    if isinstance(error, SyntaxError):
        return [traceback.FrameSummary(error.filename or "", error.lineno or 0, "")]
    return list(traceback.extract_tb(error.__traceback__))


@cache
def _execute_file(file: str, source: str) -> ModuleType:
    """Return the module that `source` defines. Its name contains a digest of path and text."""
    digest = hashlib.sha256(f"{file}\0{source}".encode()).hexdigest()
    module = ModuleType(f"perilune_user_{digest[:16]}")
    module.__file__ = file
    sys.modules[module.__name__] = module  # dataclasses and pydantic look up their module
    try:
        exec(compile(source, file, "exec"), module.__dict__)  # noqa: S102 - the user's own file
    except BaseException:
        del sys.modules[module.__name__]
        raise
    return module
