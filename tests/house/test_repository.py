"""Files contain only the project: no private paths, package hosts, process notes or TODO markers."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BINARY = {".png", ".parquet", ".gz", ".whl", ".ico", ".safetensors"}

# A letter in brackets keeps the patterns from matching this file.
FOREIGN = {
    "a path of somebody's machine": r"(?<![\w.])/(?:work[/]|roo[t]/|hom[e]/[a-z]|User[s]/[a-z])|/tmp/bash[_]",
    "a package host": "|".join(
        [
            r"pyp[i]\.org",
            r"pythonhosted\.or[g]",
            r"pytorch\.org/wh[l]",
            r"anaconda\.or[g]",
            r"index-url[ =]http[s]?:",
        ]
    ),
    "how it was made": "|".join(
        [
            r"(?i)\bissue[ ]#?\d",
            r"\bcolleague[s]?\b",
            r"\bthe[ ]brief\b",
            r"shared/referenc[e]",
            r"\.\./share[d]",
            r"\bthis[ ]session\b",
            r"\bhelper[s]? (?:session|agent)",
        ]
    ),
}
UNDONE = r"\bTOD[O]\b|\bFIXM[E]\b|\bXX[X]\b|NotImplementedErro[r]"


def tracked() -> list[Path]:
    """Files of the repository: tracked files, and untracked files that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout: clone the repository to run this test")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and path.suffix not in BINARY]


def matches(pattern: str, paths: list[Path]) -> list[str]:
    """Matches of a pattern, as "file:line: text"."""
    places = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if match := re.search(pattern, line):
                places.append(f"{path.relative_to(ROOT)}:{number}: {match[0]}")
    return places


@pytest.mark.parametrize("what", FOREIGN)
def test_files_contain_no_private_paths_hosts_or_process_notes(what: str) -> None:
    places = matches(FOREIGN[what], tracked())
    assert not places, f"{what}:\n" + "\n".join(places)


def test_source_has_no_todo_markers() -> None:
    places = matches(UNDONE, [path for path in tracked() if path.is_relative_to(ROOT / "src")])
    assert not places, "\n".join(places)


def test_names_of_test_files_are_unique() -> None:
    """pytest imports test files by name, so it would skip one of two files with the same name."""
    names = [path.name for path in tracked() if path.is_relative_to(ROOT / "tests") and path.suffix == ".py"]
    twice = {name for name in names if names.count(name) > 1 and name != "conftest.py"}
    assert not twice


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (FOREIGN["a path of somebody's machine"], "cp /wor" + "k/main/x ."),
        (FOREIGN["a path of somebody's machine"], "PERILUNE_HOME=/hom" + "e/ada/runs"),
        (FOREIGN["a package host"], "https://py" + "pi.org/simple"),
        (FOREIGN["how it was made"], "as issue" + " 2 asks"),
        (UNDONE, "# TO" + "DO: later"),
    ],
)
def test_patterns_match_forbidden_text(tmp_path: Path, pattern: str, text: str) -> None:
    assert re.search(pattern, text)


@pytest.mark.parametrize("text", ["~/.perilune/runs", "/proc/self/statm", "the network/home", "worker.py"])
def test_patterns_ignore_allowed_text(text: str) -> None:
    assert not any(re.search(pattern, text) for pattern in (*FOREIGN.values(), UNDONE))
