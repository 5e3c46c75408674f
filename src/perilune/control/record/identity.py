"""The runs and machines that a home owns, as opposed to those of the home that it was restored from.

Each home has a random name (`cluster_id`). A restored home gets a new name, and its `inherited.json` lists
the runs that were live in the original. The restored home does not act on those runs or on machines that the
original rented, until the user confirms with `perilune adopt` that the original no longer exists.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from perilune.control.machines.providers import CLUSTER_FILE, cluster_id
from perilune.control.record.home import Home
from perilune.control.record.store import Store, record_event
from perilune.errors import RequestError
from perilune.execution.providers.protocol import MachineKey
from perilune.files import read_json, write_json

INHERITED_FILE, ADOPTED_FILE = "inherited.json", "adopted.json"
ADOPT_REMEDY = "do it in that home; if that home no longer exists: perilune adopt"


@dataclass(frozen=True, slots=True)
class Inherited:
    """The homes and runs that a restored home knows of but does not own.

    Attributes:
        homes: names of the home it was restored from, and of homes which that one had adopted.
        runs: runs that were live, or not proven to have stopped, when the backup was made.
    """

    homes: tuple[str, ...] = ()
    runs: frozenset[str] = frozenset()


def read_inherited(home: Home) -> Inherited:
    """Return the homes and runs that a home does not own; empty unless it was restored."""
    path = home.root / INHERITED_FILE
    if not path.exists():
        return Inherited()
    document = read_json(path)
    return Inherited(tuple(document["homes"]), frozenset(document["runs"]))


def inherit(original: Home, copy: Home, runs: Collection[str], machines: Iterable[str] = ()) -> Inherited:
    """Give `copy`, a copy of the home `original`, its own name; `runs` and `machines` stay the original's."""
    before, adopted = read_inherited(copy), _read_adopted(copy)
    name = original.root / CLUSTER_FILE
    homes = [name.read_text(encoding="utf-8")] if name.exists() else []
    homes += [key.cluster for text in machines if (key := MachineKey.parse(text)) is not None]
    (copy.root / ADOPTED_FILE).unlink(missing_ok=True)
    known = dict.fromkeys([*homes, *adopted, *before.homes])
    result = Inherited(tuple(known), before.runs | set(runs))
    write_json(copy.root / INHERITED_FILE, {"homes": result.homes, "runs": sorted(result.runs)})
    cluster_id(copy)
    return result


def adopt(home: Home, store: Store) -> Inherited:
    """Take over what a restored home has inherited, because the original no longer exists.

    Raises:
        RequestError: there is nothing to adopt.
    """
    adopted = read_inherited(home)
    if not (home.root / INHERITED_FILE).exists():
        raise RequestError("nothing to adopt: this home owns everything in its record", where=str(home.root))
    with store.transaction() as session:
        record_event(session, "home.adopted", homes=list(adopted.homes), runs=sorted(adopted.runs))
    write_json(home.root / ADOPTED_FILE, [*_read_adopted(home), *adopted.homes])
    (home.root / INHERITED_FILE).unlink()
    return adopted


def cluster_names(home: Home, keys: Iterable[str] = ()) -> list[str]:
    """Return the names under which a home has rented machines: its own, then those of adopted homes.

    Args:
        keys: of recorded machines. The names in keys of own machines are added: the home rented them under
            another name if the file with its name was lost since.
    """
    owned = [MachineKey.parse(key) for key in keys if owns_machine(home, key)]
    recorded = (key.cluster for key in owned if key is not None)
    return list(dict.fromkeys([cluster_id(home), *_read_adopted(home), *recorded]))


def owns_machine(home: Home, key: str) -> bool:
    """Return whether this home rented a machine, and not the home that it was restored from."""
    parsed = MachineKey.parse(key)
    return parsed is None or parsed.cluster not in read_inherited(home).homes


def require_own_run(home: Home, run_id: str) -> None:
    """Refuse to act on a run of another home.

    Raises:
        RequestError: the run was live in the original when this home was restored.
    """
    other = read_inherited(home)
    if run_id in other.runs:
        raise RequestError(
            f"the run belongs to another home ({', '.join(other.homes) or 'the original'}), "
            "from whose backup this home was restored",
            where=f"run {run_id}",
            remedy=ADOPT_REMEDY,
        )


def _read_adopted(home: Home) -> list[str]:
    path = home.root / ADOPTED_FILE
    return list(read_json(path)) if path.exists() else []
