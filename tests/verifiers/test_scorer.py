"""The scorer process with scorers that hang, crash, fork, exhaust memory, flood output or attempt escapes."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from perilune.control.runs.planner import RetryClass, RetryPolicy, retry_class
from perilune.environments.core.protocol import Failure, Score, Task, Transcript
from perilune.errors import ProcessLostError, RequestError, WorkFailedError
from perilune.execution.verdict import find_cause
from perilune.sandbox.landlock import landlock_version
from perilune.sandbox.seccomp import denied_calls
from perilune.verifiers import Scorer, ScorerLimits
from perilune.verifiers.process import MAX_STARTS

SPEC = {"id": "factory", "factory": "hostile_environment:make"}
TASK = Task("t", ({"role": "user", "content": "?"},), {})
LIMITS = ScorerLimits(item_seconds=5.0, memory_bytes=128 << 20)

needs_landlock = pytest.mark.skipif(landlock_version() == 0, reason="needs a Linux kernel with Landlock")


@pytest.fixture(scope="module")
def shared():
    with Scorer(SPEC, LIMITS) as scorer:
        yield scorer


def score_texts(scorer, *texts):
    return scorer.score([(TASK, Transcript(text)) for text in texts])


def failure_reason(scorer, text):
    (outcome,) = score_texts(scorer, text)
    assert isinstance(outcome, Failure), outcome
    assert outcome.boundary == "verifier"
    return outcome.reason


def test_scores_keep_order_terms_and_metrics(shared):
    outcomes = score_texts(shared, *(f"good {i}" for i in range(200)))
    assert [outcome.reward for outcome in outcomes] == list(range(200))
    assert outcomes[7] == Score(7.0, {"raw": 1.0}, {"strategy/direct": 1.0})


def test_reward_as_text_counts_as_its_number(shared):
    assert [outcome.reward for outcome in score_texts(shared, "word 1.0", "word  -2e-1")] == [1.0, -0.2]


def test_empty_batch_returns_no_scores(shared):
    assert shared.score([]) == []


def test_failed_item_does_not_affect_other_items_of_batch():
    with Scorer(SPEC, ScorerLimits(item_seconds=1.0)) as scorer:
        texts = ["good 1", "spin", "good 2", "exit", "good 3", "throw oops", "good 4", "crash", "good 5"]
        outcomes = score_texts(scorer, *texts)
        assert [o.reward if isinstance(o, Score) else None for o in outcomes] == [
            1, None, 2, None, 3, None, 4, None, 5,
        ]  # fmt: skip
        assert scorer.restarts == 3  # an exception does not end the process
        assert "no answer within 1 s" in outcomes[1].reason
        assert "exit code 3" in outcomes[3].reason
        assert "ValueError: oops" in outcomes[5].reason
        assert "SIGSEGV" in outcomes[7].reason


def test_item_that_dies_from_a_signal_without_a_name_fails_alone(shared):
    assert failure_reason(shared, "end_by_signal 40") == "the scorer's process was killed by signal 40"


def test_item_that_ignores_signals_is_killed_at_time_limit():
    with Scorer(SPEC, ScorerLimits(item_seconds=1.0)) as scorer:
        score_texts(scorer, "good")
        begun = time.monotonic()
        assert "no answer" in failure_reason(scorer, "ignore_signals_and_sleep")
        assert time.monotonic() - begun < 30  # the item sleeps for 60 s


def test_batch_has_own_time_limit():
    with Scorer(SPEC, ScorerLimits(item_seconds=5.0, batch_seconds=1.0)) as scorer:
        score_texts(scorer, "good")
        begun = time.monotonic()
        outcomes = score_texts(scorer, *["sleep 0.25"] * 200)
        assert time.monotonic() - begun < 30
        assert isinstance(outcomes[0], Score)
        assert isinstance(outcomes[-1], Failure) and "the batch took more than 1 s" in outcomes[-1].reason
        assert len(outcomes) == 200


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("throw boom", "ValueError: boom"),
        ("leave", "SystemExit"),
        ("nothing", "NoneType"),
        ("number nan", "not finite"),
        ("number inf", "not finite"),
        ("metric nan", "not finite"),
        ("word high", "invalid numbers"),
        ("memory", "MemoryError"),
        ("flood_errors", "standard error"),
        ("flood_answers", "bytes for one answer"),
        ('babble {"item": 7, "reward": 1}', "out of turn"),
        ("babble [1, 2]", "malformed"),
        ("babble {", "malformed"),
        ('babble {"item": 0, "reward": {}}', "malformed"),
        ('babble {"item": 0, "reward": 1%s, "terms": {}, "metrics": {}}' % ("0" * 400), "malformed"),
    ],
)
def test_misbehaving_scorer_gives_failure_instead_of_zero(shared, text, expected):
    assert expected in failure_reason(shared, text)
    assert score_texts(shared, "good") == [Score(1.0, {"raw": 1.0}, {"strategy/direct": 1.0})]


def test_failure_from_environment_is_returned_unchanged(shared):
    assert score_texts(shared, "failure") == [Failure("environment", "the world ended")]


def test_printed_output_does_not_affect_scores(shared):
    assert score_texts(shared, "print", "good 2") == [
        Score(1.0),
        Score(2.0, {"raw": 1.0}, {"strategy/direct": 1.0}),
    ]


def test_audit_hook_blocks_files_processes_signals_and_connections(shared, tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("kept")
    new = tmp_path / "new"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for text in (
            f"write {new}",
            f"write {kept}",
            f"delete {kept}",
            f"spawn {new}",
            "fork",
            "kill_parent",
        ):
            assert "may not" in failure_reason(shared, text), text
        assert "not permitted" in failure_reason(shared, f"connect {port}")
    assert not new.exists()
    assert kept.read_text() == "kept"


KEYCTL = {"keyctl": denied_calls().get("keyctl", 0)}
SOCKET_BY_PATH = """
import socket
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
a.sendto(b"x", {path!r})
"""
ESCAPES = {
    "a UDP socket": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "a socket to a path": "import socket; socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "a pair of sockets to a path": SOCKET_BY_PATH,
    "a stream pair to a path": "import socket; socket.socketpair()[0].connect({path!r})",
    "fork": "import os; os.fork()",
    "fork and exec": "import subprocess; subprocess.Popen(['/bin/true'])",
    "fork_exec": "import _posixsubprocess, os; r, w = os.pipe(); _posixsubprocess.fork_exec([b'/bin/true'],"
    "[b'/bin/true'], True, (w,), None, None, -1, -1, -1, -1, -1, -1, r, w, True, False, 0, None, None, None,"
    " -1, None, False)",
    "a signal to the parent": "import os; os.kill(os.getppid(), 0)",
    "a signal to the scorer's owner": "import os; os.kill({owner}, 0)",
    "a signal by a pipe": "import fcntl, os; fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, {owner})",
    "keys": "assert LIBC.syscall({keyctl}, 0, -3, 1) < 0, 'keyctl'; import os; raise PermissionError",
    "namespaces": "assert LIBC.unshare(0x4000000) < 0, 'unshare'; raise PermissionError",
    "the host's name": "import socket; socket.sethostname('other')",
    "the clock": "import time; time.clock_settime(time.CLOCK_REALTIME, time.time())",
    "another user": "import os; os.setuid(65534)",
    "priorities": "import os; os.setpriority(os.PRIO_PROCESS, {owner}, 5)",
}


@needs_landlock
@pytest.mark.usefixtures("walls")
@pytest.mark.parametrize("name", ESCAPES)
def test_kernel_blocks_code_that_disarms_audit_hook(shared, name, tmp_path):
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(path)
        code = "disarm\n" + ESCAPES[name].format(path=path, owner=os.getpid(), **KEYCTL)
        assert re.search(
            "PermissionError|Errno 1\\]|Errno 106|is already connected", failure_reason(shared, f"run {code}")
        )
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.recv(10)
    assert score_texts(shared, "good") == [Score(1.0, {"raw": 1.0}, {"strategy/direct": 1.0})]


def test_answer_that_patches_scorer_does_not_affect_later_batches():
    with Scorer(SPEC, LIMITS) as scorer:
        score_texts(scorer, "poison 1")
        assert [score.reward for score in score_texts(scorer, "answer wrong", "answer right")] == [0.0, 1.0]
        assert not scorer.processes[0].isolates_answers


@pytest.mark.parametrize("own", ["0", "1"])
def test_answer_that_patches_scorer_is_detected_within_batch(own, caplog):
    with Scorer(SPEC, LIMITS) as scorer:
        batch = [f"poison {own}", *["answer wrong"] * 7]
        for _ in range(200):  # if the first answer also earns 1, the repeated check may pick that answer
            outcomes = score_texts(scorer, *batch)
            if scorer.processes[0].isolates_answers:
                break
        assert [outcome.reward for outcome in outcomes] == [float(own), *[0.0] * 7]
        assert "every answer is scored in its own process" in caplog.text
        assert [score.reward for score in score_texts(scorer, *batch, "answer right")] == [
            float(own),
            *[0.0] * 7,
            1.0,
        ]


def test_scorer_process_restarts_when_killed_before_scoring():
    with Scorer(SPEC, LIMITS) as scorer:
        for wait in (False, True):  # while the process starts, and when the process is idle
            if wait:
                score_texts(scorer, "good")
            os.kill(scorer.processes[0]._server.process_id, signal.SIGKILL)
            assert score_texts(scorer, "good") == [Score(1.0, {"raw": 1.0}, {"strategy/direct": 1.0})]


def test_scorer_killed_at_every_start_is_infrastructure_failure():
    message = f"SIGKILL, {MAX_STARTS} times, before it scored"
    with (
        Scorer(SPEC | {"mode": "killed"}) as scorer,
        pytest.raises(ProcessLostError, match=message) as caught,
    ):
        score_texts(scorer, "good")
    cause = find_cause(caught.value)
    assert retry_class(cause) is RetryClass.INFRASTRUCTURE and RetryPolicy().allows_retry(cause, [])


@needs_landlock
def test_kernel_blocks_file_opened_from_c(shared, tmp_path):
    new = tmp_path / "new"
    assert score_texts(shared, f"write_in_c {new}") == [Failure("sandbox", "-1")]
    assert not new.exists()


@needs_landlock
def test_kernel_blocks_reading_files_outside_python(shared, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    assert "PermissionError" in failure_reason(shared, f"read {secret}")
    assert "PermissionError" in failure_reason(shared, f"read /proc/{os.getpid()}/environ")


def test_scorer_process_inherits_no_secrets(monkeypatch):
    monkeypatch.setenv("PERILUNE_TEST_TOKEN", "hunter2")
    with Scorer(SPEC, LIMITS) as scorer:
        assert score_texts(scorer, "environment PERILUNE_TEST_TOKEN") == [Failure("sandbox", "absent")]


def test_scorer_process_has_own_session_and_working_directory(shared):
    (outcome,) = score_texts(shared, "session")
    session, pid, directory = outcome.reason.split()
    assert session not in (pid, str(os.getsid(0)))
    assert directory != str(Path.cwd())


def test_process_forked_from_c_ends_with_scorer():
    with Scorer(SPEC, LIMITS) as scorer:
        (outcome,) = score_texts(scorer, "fork_in_c")
        pid = int(outcome.reason)
    if pid > 0:  # the limit on processes does not apply to root
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process_is_running(pid):
            time.sleep(0.02)
        assert not process_is_running(pid)


ORPHAN = """
import sys
from perilune.environments import Task, Transcript
from perilune.verifiers import Scorer, ScorerLimits
sys.path.insert(0, sys.argv[1])
scorer = Scorer({"id": "factory", "factory": "hostile_environment:make"}, ScorerLimits(item_seconds=60))
task = Task("t", (), {})
scorer.score([(task, Transcript("good"))])
print(scorer.processes[0]._server.process_id, flush=True)
scorer.score([(task, Transcript("sleep 60"))])
"""


def test_busy_scorer_process_dies_with_parent():
    command = [sys.executable, "-c", ORPHAN, str(Path(__file__).parent)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    time.sleep(0.3)  # scoring has started
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process_is_running(pid):
        time.sleep(0.02)
    assert not process_is_running(pid)


def test_invalid_section_raises_request_error():
    with Scorer(SPEC | {"mode": "refuse"}) as scorer, pytest.raises(RequestError) as caught:
        score_texts(scorer, "good")
    assert (caught.value.what, caught.value.where) == ("no such mode", "environment.mode")


def test_failed_start_reports_last_output_of_process():
    with Scorer(SPEC | {"mode": "die"}) as scorer, pytest.raises(WorkFailedError, match="cannot start"):
        score_texts(scorer, "good")


def test_several_workers_keep_order():
    with Scorer(SPEC, ScorerLimits(item_seconds=0.5), workers=2) as scorer:
        outcomes = score_texts(scorer, *("exit" if i in (3, 9) else f"good {i}" for i in range(12)))
    assert [getattr(o, "reward", None) for o in outcomes] == [
        None if i in (3, 9) else float(i) for i in range(12)
    ]


def test_scorer_accepts_large_tasks(shared):
    text = "good 1"
    data = {"metadata": "y" * 300_000}
    task = Task("t", ({"role": "user", "content": "?"},), data)
    assert len(shared.score([(task, Transcript(text))] * 100)) == 100


def test_every_item_gets_full_cpu_time():
    with Scorer(SPEC, ScorerLimits(item_seconds=0.2)) as scorer:
        score_texts(scorer, "good")
        for _ in range(3):
            assert isinstance(score_texts(scorer, "sleep 0.05")[0], Score)
        assert scorer.restarts == 0


def process_is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
