"""The scorer's process against scorers that hang, die, fork, hoard, flood, lie and reach out."""

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
from perilune.execution.verdict import cause_of
from perilune.sandbox.landlock import landlock_version
from perilune.sandbox.seccomp import denied_calls
from perilune.verifiers import Scorer, ScorerLimits
from perilune.verifiers.process import STARTS

SPEC = {"id": "factory", "factory": "hostile_environment:make"}
TASK = Task("t", ({"role": "user", "content": "?"},), {})
LIMITS = ScorerLimits(item_seconds=5.0, memory_bytes=128 << 20)

needs_landlock = pytest.mark.skipif(landlock_version() == 0, reason="needs a Linux kernel with Landlock")


@pytest.fixture(scope="module")
def shared():
    with Scorer(SPEC, LIMITS) as scorer:
        yield scorer


def judge(scorer, *texts):
    return scorer.score([(TASK, Transcript(text)) for text in texts])


def reason(scorer, text):
    (outcome,) = judge(scorer, text)
    assert isinstance(outcome, Failure), outcome
    assert outcome.boundary == "verifier"
    return outcome.reason


def test_scores_come_back_in_order_with_terms_and_metrics(shared):
    outcomes = judge(shared, *(f"good {i}" for i in range(200)))
    assert [outcome.reward for outcome in outcomes] == list(range(200))
    assert outcomes[7] == Score(7.0, {"raw": 1.0}, {"strategy/direct": 1.0})


def test_an_empty_batch_is_no_work(shared):
    assert shared.score([]) == []


def test_each_bad_item_fails_alone_and_order_is_kept():
    with Scorer(SPEC, ScorerLimits(item_seconds=1.0)) as scorer:
        texts = ["good 1", "spin", "good 2", "exit", "good 3", "throw oops", "good 4", "crash", "good 5"]
        outcomes = judge(scorer, *texts)
        assert [o.reward if isinstance(o, Score) else None for o in outcomes] == [
            1, None, 2, None, 3, None, 4, None, 5,
        ]  # fmt: skip
        assert scorer.restarts == 3  # raising does not cost the process
        assert "no answer within 1 s" in outcomes[1].reason
        assert "exit code 3" in outcomes[3].reason
        assert "ValueError: oops" in outcomes[5].reason
        assert "SIGSEGV" in outcomes[7].reason


def test_a_hang_that_ignores_signals_is_killed_on_time():
    with Scorer(SPEC, ScorerLimits(item_seconds=1.0)) as scorer:
        judge(scorer, "good")
        begun = time.monotonic()
        assert "no answer" in reason(scorer, "ignore_signals_and_sleep")
        assert time.monotonic() - begun < 30  # it sleeps for 60


def test_a_batch_has_a_deadline_of_its_own():
    with Scorer(SPEC, ScorerLimits(item_seconds=5.0, batch_seconds=1.0)) as scorer:
        judge(scorer, "good")
        begun = time.monotonic()
        outcomes = judge(scorer, *["sleep 0.25"] * 200)
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
    ],
)
def test_a_bad_scorer_is_a_failure_and_never_a_zero(shared, text, expected):
    assert expected in reason(shared, text)
    assert judge(shared, "good") == [Score(1.0, {"raw": 1.0}, {"strategy/direct": 1.0})]


def test_a_failure_of_the_environment_passes_through(shared):
    assert judge(shared, "failure") == [Failure("environment", "the world ended")]


def test_what_a_scorer_prints_disturbs_nothing(shared):
    assert judge(shared, "print", "good 2") == [
        Score(1.0),
        Score(2.0, {"raw": 1.0}, {"strategy/direct": 1.0}),
    ]


def test_no_process_file_signal_or_connection_leaves_the_scorer(shared, tmp_path):
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
            assert "may not" in reason(shared, text), text
        assert "not permitted" in reason(shared, f"connect {port}")
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
def test_code_that_disarms_the_hook_meets_the_kernel(shared, name, tmp_path):
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(path)
        code = "disarm\n" + ESCAPES[name].format(path=path, owner=os.getpid(), **KEYCTL)
        assert re.search(
            "PermissionError|Errno 1\\]|Errno 106|is already connected", reason(shared, f"run {code}")
        )
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.recv(10)
    assert judge(shared, "good") == [Score(1.0, {"raw": 1.0}, {"strategy/direct": 1.0})]


def test_an_answer_that_changes_the_scorer_changes_no_later_batch():
    with Scorer(SPEC, LIMITS) as scorer:
        judge(scorer, "poison 1")
        assert [one.reward for one in judge(scorer, "answer wrong", "answer right")] == [0.0, 1.0]
        assert not scorer.processes[0].isolates_answers


@pytest.mark.parametrize("own", ["0", "1"])
def test_an_answer_that_changes_the_scorer_is_found_out_within_its_batch(own, caplog):
    with Scorer(SPEC, LIMITS) as scorer:
        batch = [f"poison {own}", *["answer wrong"] * 7]
        for _ in range(200):  # where its own answer pays too, that may be the one that is judged again
            outcomes = judge(scorer, *batch)
            if scorer.processes[0].isolates_answers:
                break
        assert [one.reward for one in outcomes] == [float(own), *[0.0] * 7]
        assert "every answer is scored in its own process" in caplog.text
        assert [one.reward for one in judge(scorer, *batch, "answer right")] == [float(own), *[0.0] * 7, 1.0]


def test_a_scorer_that_is_killed_before_it_judges_is_started_again():
    with Scorer(SPEC, LIMITS) as scorer:
        for wait in (False, True):  # while it starts; when it is idle
            if wait:
                judge(scorer, "good")
            os.kill(scorer.processes[0]._server.process_id, signal.SIGKILL)
            assert judge(scorer, "good") == [Score(1.0, {"raw": 1.0}, {"strategy/direct": 1.0})]


def test_a_scorer_that_is_killed_each_time_is_no_fault_of_the_run():
    said = f"SIGKILL, {STARTS} times, before it scored"
    with (
        Scorer(SPEC | {"mode": "killed"}) as scorer,
        pytest.raises(ProcessLostError, match=said) as caught,
    ):
        judge(scorer, "good")
    cause = cause_of(caught.value)
    assert retry_class(cause) is RetryClass.INFRASTRUCTURE and RetryPolicy().allows(cause, [])


@needs_landlock
def test_the_kernel_refuses_what_goes_around_python(shared, tmp_path):
    new = tmp_path / "new"
    assert judge(shared, f"write_in_c {new}") == [Failure("sandbox", "-1")]
    assert not new.exists()


@needs_landlock
def test_no_file_outside_pythons_own_can_be_read(shared, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    assert "PermissionError" in reason(shared, f"read {secret}")
    assert "PermissionError" in reason(shared, f"read /proc/{os.getpid()}/environ")


def test_no_secret_is_inherited(monkeypatch):
    monkeypatch.setenv("PERILUNE_TEST_TOKEN", "hunter2")
    with Scorer(SPEC, LIMITS) as scorer:
        assert judge(scorer, "environment PERILUNE_TEST_TOKEN") == [Failure("sandbox", "absent")]


def test_the_process_has_a_session_and_a_working_directory_of_its_own(shared):
    (outcome,) = judge(shared, "session")
    session, pid, directory = outcome.reason.split()
    assert session not in (pid, str(os.getsid(0)))
    assert directory != str(Path.cwd())


def test_a_process_forked_behind_pythons_back_does_not_outlive_the_scorer():
    with Scorer(SPEC, LIMITS) as scorer:
        (outcome,) = judge(scorer, "fork_in_c")
        pid = int(outcome.reason)
    if pid > 0:  # root is not bound by the limit on processes
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and _runs(pid):
            time.sleep(0.02)
        assert not _runs(pid)


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


def test_a_busy_process_dies_with_its_parent():
    command = [sys.executable, "-c", ORPHAN, str(Path(__file__).parent)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    time.sleep(0.3)  # the item is under way
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and _runs(pid):
        time.sleep(0.02)
    assert not _runs(pid)


def test_a_wrong_section_is_the_requests_fault():
    with Scorer(SPEC | {"mode": "refuse"}) as scorer, pytest.raises(RequestError) as caught:
        judge(scorer, "good")
    assert (caught.value.what, caught.value.where) == ("no such mode", "environment.mode")


def test_a_process_that_cannot_start_is_reported_with_its_last_words():
    with Scorer(SPEC | {"mode": "die"}) as scorer, pytest.raises(WorkFailedError, match="cannot start"):
        judge(scorer, "good")


def test_several_workers_keep_the_order():
    with Scorer(SPEC, ScorerLimits(item_seconds=0.5), workers=2) as scorer:
        outcomes = judge(scorer, *("exit" if i in (3, 9) else f"good {i}" for i in range(12)))
    assert [getattr(o, "reward", None) for o in outcomes] == [
        None if i in (3, 9) else float(i) for i in range(12)
    ]


def test_large_transcripts_travel(shared):
    text = "good 1"
    data = {"metadata": "y" * 300_000}
    task = Task("t", ({"role": "user", "content": "?"},), data)
    assert len(shared.score([(task, Transcript(text))] * 100)) == 100


def test_cpu_time_is_granted_anew_to_every_item():
    with Scorer(SPEC, ScorerLimits(item_seconds=0.2)) as scorer:
        judge(scorer, "good")
        for _ in range(3):
            assert isinstance(judge(scorer, "sleep 0.05")[0], Score)
        assert scorer.restarts == 0


def _runs(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
