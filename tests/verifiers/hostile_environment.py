"""An environment whose scorer runs the hostile action that the transcript names."""

import ctypes
import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

from perilune.environments.core.protocol import Failure, Score
from perilune.errors import RequestError

LIBC = ctypes.CDLL(None)  # looked up before the process is confined, as a compiled library's would be
C_FORK, C_OPEN = LIBC.fork, LIBC.open


def make(spec):
    mode = spec.get("mode")
    if mode == "refuse":
        raise RequestError("no such mode", where="environment.mode", remedy="another mode")
    if mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "die":
        raise SystemExit("cannot start")
    return HostileEnvironment()


class HostileEnvironment:
    id = "hostile"

    def tasks(self, split, seed):
        return iter(())

    def score(self, task, transcript):
        action, _, argument = transcript.text.partition(" ")
        return getattr(self, action)(argument)

    def poison(self, argument):
        """Patches the scorer so that every later answer earns 1, in this process and in its forks."""
        HostileEnvironment.answer = lambda self, argument: Score(1.0)
        return Score(float(argument or 0.0))

    def answer(self, argument):
        return Score(float(argument == "right"))

    def good(self, argument):
        return Score(float(argument or 1.0), {"raw": 1.0}, {"strategy/direct": 1.0})

    def failure(self, argument):
        return Failure("environment", "the world ended")

    def spin(self, argument):
        while True:
            pass

    def sleep(self, argument):
        time.sleep(float(argument))
        return Score(1.0)

    def ignore_signals_and_sleep(self, argument):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)

    def exit(self, argument):
        os._exit(3)

    def leave(self, argument):
        sys.exit(0)

    def crash(self, argument):
        faulthandler._sigsegv()

    def end_by_signal(self, argument):
        signal.raise_signal(int(argument))

    def throw(self, argument):
        raise ValueError(argument)

    def nothing(self, argument):
        return None

    def number(self, argument):
        return Score(float(argument))

    def metric(self, argument):
        return Score(1.0, {}, {"x": float(argument)})

    def word(self, argument):
        return Score(argument)

    def memory(self, argument):
        hoard = []
        while True:
            hoard.append(bytearray(64 << 20))

    def fork(self, argument):
        os.fork()
        return Score(1.0)

    def fork_in_c(self, argument):
        pid = C_FORK()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        return Failure("sandbox", str(pid))

    def spawn(self, argument):
        os.system(f"touch {argument}")
        return Score(1.0)

    def print(self, argument):
        sys.stdout.write("x" * 10_000_000)
        sys.stdout.flush()
        return Score(1.0)

    def flood_errors(self, argument):
        while True:
            os.write(2, b"x" * 65536)

    def flood_answers(self, argument):
        while True:
            for descriptor in range(3, 16):
                try:
                    os.write(descriptor, b"x" * 65536)
                except OSError:
                    continue

    def babble(self, argument):
        for descriptor in range(3, 16):
            try:
                os.write(descriptor, argument.encode() + b"\n")
            except OSError:
                continue
        return Score(1.0)

    def write(self, argument):
        Path(argument).write_text("gotcha")
        return Score(1.0)

    def write_in_c(self, argument):
        descriptor = C_OPEN(argument.encode(), os.O_WRONLY | os.O_CREAT, 0o644)
        return Failure("sandbox", str(descriptor))

    def delete(self, argument):
        Path(argument).unlink()
        return Score(1.0)

    def read(self, argument):
        return Failure("sandbox", Path(argument).read_text())

    def connect(self, argument):
        import socket

        socket.create_connection(("127.0.0.1", int(argument)))
        return Score(1.0)

    def kill_parent(self, argument):
        os.kill(os.getppid(), signal.SIGTERM)
        return Score(1.0)

    def run(self, argument):
        """Runs the text as code; the word "disarm" first disarms the audit hook found on the stack."""
        if "disarm" in argument:
            frame, hooks = sys._getframe(), []
            while frame is not None:
                hooks += [value for value in frame.f_locals.values() if type(value).__name__ == "Confinement"]
                frame = frame.f_back
            for hook in hooks:
                hook.armed = False
            assert hooks
        scope = {}
        exec(argument.replace("disarm", ""), {"LIBC": LIBC, "scorer": self}, scope)
        return Failure("sandbox", str(scope.get("said")))

    def environment(self, argument):
        return Failure("sandbox", os.environ.get(argument, "absent"))

    def session(self, argument):
        return Failure("sandbox", f"{os.getsid(0)} {os.getpid()} {Path.cwd()}")
