"""An environment whose tasks fail in different ways: {"id": "factory", "factory": "mischief:Mischief"}.

A task's `kind` decides how its episodes fail, whatever the policy writes. The kinds in CODE run code in
the sandbox.
"""

import os
import sys
import time
from hashlib import sha256

from perilune.environments import EpisodeFailedError, MultiTurn, Task, ask, end_episode
from perilune.sandbox import Sandbox, SandboxFailedError, SandboxLimits

LIMITS = SandboxLimits(
    seconds=1.5, cpu_seconds=1, memory_bytes=64 << 20, processes=5, scratch_bytes=1 << 20, scratch_files=16,
    flood_bytes=1 << 16,
)  # fmt: skip
DEAF = "import signal\nfor n in signal.valid_signals() - {9, 19}: signal.signal(n, signal.SIG_IGN)\n"
CODE = {
    "fork bomb": "import os, time\nwhile True:\n try: os.fork()\n except OSError: time.sleep(0.01)",
    "full disk": "for i in range(9):\n with open(str(i), 'wb') as f: f.write(bytes(1 << 19))",
    "deaf": DEAF + "import time; time.sleep(60)",
    "ten million lines": "for i in range(10_000_000): print(i)",
    "all memory": "x = bytearray(1 << 40)",
}
KINDS = (
    "well", "raises", "leaves", "hangs", "prints garbage", "answers garbage", "not a number", "no legal move",
    "broken sandbox", *CODE,
)  # fmt: skip


class Mischief(MultiTurn):
    """The reward is the length of the action, so that groups have different rewards."""

    id = "mischief"
    max_turns = 2
    confined = False

    def __init__(self, section):
        self.kinds = section.get("kinds", KINDS)
        self._sandbox = Sandbox(LIMITS)

    def tasks(self, split, seed):
        for number in range(10_000):
            task_id = sha256(f"{seed}/{number}".encode()).hexdigest()[:32]
            kind = self.kinds[number % len(self.kinds)]
            if split == "train":
                yield Task(task_id, ({"role": "user", "content": f"{number}="},), {"kind": kind})

    def play(self, task, chance):
        """Fail before the first action, because an untrained policy rarely ends its first turn."""
        first = {}
        match task.data["kind"]:
            case "raises":
                raise ValueError("no idea")
            case "leaves":
                sys.exit(3)
            case "hangs":
                time.sleep(3600)
            case "prints garbage":
                print("garbage\n" * 100_000)
            case "answers garbage":
                os.write(3, b"{]\n")
            case "not a number":
                first["rewards"] = (float("nan"),)
            case "no legal move":
                first["legal"] = ()
            case "broken sandbox":
                self._break()
            case kind if kind in CODE:
                result = self._sandbox.run(CODE[kind])
                cause = "refused" if result.cause == "error" else f"contained/{result.cause}"
                first["metrics"] = {cause: 1.0} if result.cause else {}
        answer = yield ask(**first)
        yield end_episode(float(len(answer)))

    def _break(self):
        os.kill(self._sandbox.process_id, 9)
        try:
            self._sandbox.run("")
        except SandboxFailedError as error:
            raise EpisodeFailedError("sandbox", str(error)) from None
