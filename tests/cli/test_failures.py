"""Every error is one message on stderr and an exit code."""

import errno
import json
import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from pydantic import ValidationError

from perilune.bundle.job import Resources
from perilune.cli.failures import report_failure
from perilune.cli.main import main
from perilune.cli.output import print_json
from perilune.errors import RequestError, WorkFailedError
from perilune.files import write_atomic


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (RequestError("bad", where="a.yaml:3", remedy="good"), 2, "error: a.yaml:3: bad\n  try: good\n"),
        (
            RequestError("bad", where="a.yaml:3", others=[RequestError("worse", remedy="good")]),
            2,
            "error: a.yaml:3: bad\nalso: worse\n  try: good\n",
        ),
        (WorkFailedError("it broke"), 1, "error: it broke\n"),
        (WorkFailedError("\x1b[2Jit\rbroke"), 1, "error: \\x1b[2Jit\nbroke\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (
            OSError(errno.ENOSPC, "No space left", "/disk/x"),
            2,
            "error: /disk/x: cannot continue: the disk is full\n",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "/disk/x"),
            2,
            "error: /disk/x: cannot continue: no perm",
        ),
        (
            OSError(errno.EROFS, "Read-only", "/disk/x"),
            2,
            "error: /disk/x: cannot continue: the file system is read-",
        ),
        (
            OSError(errno.ENAMETOOLONG, "File name too long", "x"),
            2,
            "error: x: cannot continue: the name is too long\n",
        ),
        (OSError(errno.ELOOP, "Loop", "x"), 2, "error: x: cannot continue: a symbolic link that leads to"),
        (FileExistsError(errno.EEXIST, "Exists", "x"), 2, "error: x: cannot continue: it exists already\n"),
    ],
)
def test_explain_prints_one_message_for_expected_errors(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_failure(error, debug=False) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(said)
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "error", "remedy"),
    [
        ("runs --bogus --json", "No such option: --bogus", "perilune runs -h"),
        ("top --every x --json", "Invalid value for", "perilune top -h"),
        ("cancel --json", "Missing argument", "perilune cancel -h"),
        ("show nothing --json", "no run is called 'nothing'", "perilune runs"),
        ("runz --json", "unknown command 'runz'", "perilune run"),
    ],
)
def test_error_of_json_command_is_one_line_of_json(
    words: str, error: str, remedy: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setenv("PERILUNE_HOME", str(tmp_path))
    with pytest.raises(SystemExit) as left:
        main(words.split())
    out, err = capsys.readouterr()
    document = json.loads(err)
    assert (out, err.count("\n"), left.value.code) == ("", 1, 2)
    assert document.keys() == {"error", "where", "remedy", "exit_code"}
    assert document["error"].startswith(error)
    assert document["remedy"].endswith(remedy)
    assert document["exit_code"] == 2


def test_exit_codes_of_json_commands_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PERILUNE_HOME", str(tmp_path))
    for words, code in (("runs --json", 0), ("doctor -h --json", 0)):
        with pytest.raises(SystemExit) as left:
            main(words.split())
        assert (left.value.code or 0) == code


def test_users_code_prints_beside_the_json_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "from perilune.environments.builtin.calculator import CalculatorEnvironment as Base\n"
        "print('loaded')\n"
        "class Mine(Base):\n"
        "    def __init__(self, spec):\n"
        "        super().__init__(Base.Spec())\n"
        "        print('made')\n"
    )
    with pytest.raises(SystemExit) as ended:
        main(["environments", "sample", "mine.py:Mine", "-n", "1", "--json"])
    out, err = capsys.readouterr()
    assert ended.value.code in {0, None}, err
    assert len(json.loads(out)["tasks"]) == 1 and "loaded" in err and "made" in err
    print("stdout again")
    assert capsys.readouterr().out == "stdout again\n"


def test_print_json_writes_numbers_that_json_lacks_as_null(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [float("nan"), 1.5], "b": float("-inf"), "c": Path("x")})
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5], "b": None, "c": "x"}


def test_explain_saves_traceback_of_unexpected_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    try:
        raise ZeroDivisionError("division by zero")
    except ZeroDivisionError as error:
        assert report_failure(error, debug=False) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: unexpected ZeroDivisionError: division by zero\n")
    saved = Path(re.search(r"the traceback is in (\S+);", err)[1])
    assert saved.parent == tmp_path
    assert saved.stat().st_mode & 0o777 == 0o600
    assert "ZeroDivisionError: division by zero" in saved.read_text()
    assert "Traceback" in saved.read_text()


def test_explain_treats_validation_error_as_request_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ValidationError) as caught:
        Resources.model_validate({"device": "gpu", "threads": -1})
    assert report_failure(caught.value, debug=False) == 2
    err = capsys.readouterr().err
    assert err == "error: Resources: device: Input should be 'auto', 'cpu' or 'cuda' (and 1 more)\n"


def test_debug_prints_the_traceback_and_saves_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert report_failure(ValueError("odd"), debug=True) == 1
    assert "ValueError: odd" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_closed_stdout_pipe_prints_no_error(tmp_path: Path) -> None:
    script = str(Path(sys.executable).with_name("perilune"))
    with subprocess.Popen([script, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""


def test_full_disk_behind_stdout_is_reported() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    script = str(Path(sys.executable).with_name("perilune"))
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([script, "--help"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert "the disk is full" in done.stderr
    assert "Exception ignored" not in done.stderr


def test_full_disk_under_an_index_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with closing(sqlite3.connect(":memory:")) as index:
        index.execute("PRAGMA max_page_count = 1")
        with pytest.raises(sqlite3.OperationalError) as caught:
            index.execute("CREATE TABLE digests (digest BLOB)")
    assert report_failure(caught.value, debug=False) == 2
    assert "cannot continue: the disk is full" in capsys.readouterr().err


def test_command_runs_with_closed_standard_streams(tmp_path: Path) -> None:
    script = str(Path(sys.executable).with_name("perilune"))
    environment = {**os.environ, "PERILUNE_HOME": str(tmp_path)}
    command = ["sh", "-c", 'exec "$0" templates list <&- >&-', script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_written_file_does_not_replace_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(FileExistsError, match="not a regular file"):
        write_atomic(pipe, "text")
    assert pipe.is_fifo()
