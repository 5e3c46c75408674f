"""The code of an external program: a repository at one commit, or a folder."""

import os
import re
import subprocess
import tarfile
import tempfile
from pathlib import Path

from perilune.bundle.storage import build_directory, publish, storage_errors
from perilune.errors import RequestError
from perilune.files import extract_archive
from perilune.tasks.black_box.environment import cache

COMMIT = re.compile(r"[0-9a-f]{40}")
URL = re.compile(r"(https|ssh|git|file)://\S+|[\w.-]+@[\w.-]+:\S+")
SECONDS = 600.0  # time limit of a git command
PROTOCOLS = "https:ssh:git:file"  # excludes transports that run a command named in the URL


def is_url(source: str) -> bool:
    """Return whether the source is the URL of a repository, and not a folder."""
    return URL.fullmatch(source) is not None


def fetch_source(source: str, commit: str | None) -> Path:
    """Return the folder with the code that a recipe names.

    Args:
        source: a folder, the folder of a git repository, or a repository's URL.
        commit: 40 hexadecimal digits; required for a repository, and not allowed otherwise.

    Raises:
        RequestError: when the folder does not exist, or the repository has no commit in the recipe, has
            uncommitted changes, lacks the commit, or has submodules.
    """
    path = None if is_url(source) else Path(source)
    if path is not None and not path.is_dir():
        raise RequestError("no folder here", where=source, remedy="give a folder, or a repository's URL")
    is_repository = path is None or (path / ".git").exists()
    if not is_repository:
        if commit is not None:
            raise RequestError("this folder is no git repository", where=source, remedy="leave `commit` out")
        assert path is not None
        return path
    if commit is None or not COMMIT.fullmatch(commit):
        message = "a repository needs a commit: all 40 digits of its hash"
        raise RequestError(message, where=source, remedy=f"commit: {_head(path) if path else '...'}")
    cached = cache() / "sources" / commit
    if path is not None:
        _refuse_changes(path)
    if not cached.is_dir():
        with storage_errors("keep the repository's files", cached), build_directory(cached) as building:
            _check_out(source if path is None else str(path), commit, building)
            publish(building, cached)
    return cached


def _head(repository: Path) -> str:
    return _git("-C", str(repository), "rev-parse", "HEAD").strip()


def _refuse_changes(repository: Path) -> None:
    changed = _git("-C", str(repository), "status", "--porcelain").splitlines()
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise RequestError(
            f"the repository has uncommitted changes: {changed[0][3:]}{more}",
            where=str(repository),
            remedy="commit them and use that commit, or revert them",
        )


def _check_out(source: str, commit: str, destination: Path) -> None:
    """Write the files of one commit, without the repository, to `destination`."""
    with tempfile.TemporaryDirectory() as scratch:
        bare = str(Path(scratch) / "bare")
        _git("init", "--quiet", "--bare", bare)
        _git("-C", bare, "fetch", "--quiet", "--depth", "1", "--no-tags", "--", source, commit)
        resolved = _git("-C", bare, "rev-parse", "--verify", f"{commit}^{{commit}}").strip()
        if resolved != commit:
            raise RequestError(f"{commit} is not a commit", where=source)
        if _git("-C", bare, "ls-tree", commit, "--", ".gitmodules"):
            message = "the repository has submodules, which are not supported"
            raise RequestError(message, where=source, remedy="use a repository without submodules")
        # Attributes here have precedence over the repository's, which would leave out or change files.
        Path(bare, "info", "attributes").write_text("* -export-ignore -export-subst\n", encoding="utf-8")
        archive = Path(scratch) / "files.tar"
        _git("-C", bare, "archive", "--format=tar", f"--output={archive}", commit)
        with tarfile.open(archive) as tar:
            extract_archive(tar, destination)


def _git(*arguments: str) -> str:
    environment = os.environ | {"GIT_TERMINAL_PROMPT": "0", "GIT_ALLOW_PROTOCOL": PROTOCOLS}
    try:
        answer = subprocess.run(
            ["git", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise RequestError("git is required and not installed", remedy="install git") from None
    except subprocess.TimeoutExpired:
        raise RequestError(f"git did not answer within {SECONDS:.0f} s", where=arguments[-1]) from None
    if answer.returncode:
        message = answer.stderr.strip().partition("\n")[0].removeprefix("fatal: ")
        where = " ".join(arguments[:1] if arguments[0] != "-C" else arguments[1:3])
        raise RequestError(f"git: {message}", where=where)
    return answer.stdout
