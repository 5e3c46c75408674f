"""Whose runs and machines the record of a home is about: its own, or those of the home it was restored from.

Each home has a random name, made once (`cluster_id`). A restored home gets a new one, and `inherited.json`
beside its record lists the runs that were under way in the original. No command of the copy acts on those, or
on machines that the original rented, until the user says that the original is gone: `perilune adopt`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from perilune.control.machines.providers import CLUSTER, cluster_id
from perilune.control.record.home import Home
from perilune.control.record.store import Store, record
from perilune.errors import RequestError
from perilune.execution.providers.protocol import MachineKey
from perilune.files import read_json, write_json

INHERITED, ADOPTED = "inherited.json", "adopted.json"
REMEDY = "do it in that home; if that home is gone: perilune adopt"


@dataclass(frozen=True, slots=True)
class Inherited:
    """What a restored home knows of and does not own.

    Attributes:
        homes: names of the home it was restored from, and of those that this one had adopted.
        runs: those that were not over, or not proven to have stopped, when the backup was made.
    """

    homes: tuple[str, ...] = ()
    runs: frozenset[str] = frozenset()


def inherited(home: Home) -> Inherited:
    """What a home does not own; nothing, unless it was restored."""
    path = home.root / INHERITED
    if not path.exists():
        return Inherited()
    found = read_json(path)
    return Inherited(tuple(found["homes"]), frozenset(found["runs"]))


def inherit(original: Home, copy: Home, runs: Collection[str], machines: Iterable[str] = ()) -> Inherited:
    """Give `copy`, whose files are those of `original`, a name of its own; `runs` and machines stay the
    original's."""
    before, adopted = inherited(copy), _adopted(copy)
    name = original.root / CLUSTER
    homes = [name.read_text(encoding="utf-8")] if name.exists() else []
    homes += [key.cluster for text in machines if (key := MachineKey.parse(text)) is not None]
    (copy.root / ADOPTED).unlink(missing_ok=True)
    known = dict.fromkeys([*homes, *adopted, *before.homes])
    found = Inherited(tuple(known), before.runs | set(runs))
    write_json(copy.root / INHERITED, {"homes": found.homes, "runs": sorted(found.runs)})
    cluster_id(copy)
    return found


def adopt(home: Home, store: Store) -> Inherited:
    """Take over what a restored home has inherited: the original is gone, and acts on it no more.

    Raises:
        RequestError: when there is nothing to adopt.
    """
    found = inherited(home)
    if not (home.root / INHERITED).exists():
        raise RequestError(
            "nothing to adopt: everything that this home knows of is its own", where=str(home.root)
        )
    with store.transaction() as session:
        record(session, "home.adopted", homes=list(found.homes), runs=sorted(found.runs))
    write_json(home.root / ADOPTED, [*_adopted(home), *found.homes])
    (home.root / INHERITED).unlink()
    return found


def names(home: Home, keys: Iterable[str] = ()) -> list[str]:
    """Names under which a home has rented machines: its own, then those of homes it has adopted.

    Args:
        keys: recorded machines. Their names are added where they are this home's: it had another name when
            it rented them, if the file with its name was lost.
    """
    owned = [MachineKey.parse(key) for key in keys if owns_machine(home, key)]
    recorded = (key.cluster for key in owned if key is not None)
    return list(dict.fromkeys([cluster_id(home), *_adopted(home), *recorded]))


def owns_machine(home: Home, key: str) -> bool:
    """Whether a recorded machine is this home's, and not that of a home whose record it has inherited."""
    parsed = MachineKey.parse(key)
    return parsed is None or parsed.cluster not in inherited(home).homes


def require_own_run(home: Home, run_id: str) -> None:
    """Refuse to act on a run of another home.

    Raises:
        RequestError: when this home was restored while the run was under way in the original.
    """
    found = inherited(home)
    if run_id in found.runs:
        raise RequestError(
            f"the run belongs to another home ({', '.join(found.homes) or 'the original'}), "
            "from whose backup this one was restored",
            where=f"run {run_id}",
            remedy=REMEDY,
        )


def _adopted(home: Home) -> list[str]:
    path = home.root / ADOPTED
    return list(read_json(path)) if path.exists() else []
