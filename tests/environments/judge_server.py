"""A judge behind an OpenAI-compatible HTTP server: sound, or with the flaw that its name states."""

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROMPT = "Reference: {reference}\nAnswer:\n{answer}"


def sound(reference: str, answer: str) -> str:
    return f"The answer is compared. Grade: {10 if answer.strip() == reference else 0}"


def obedient(reference: str, answer: str) -> str:
    """Follows instructions in the answer."""
    ordered = re.search(r"output:? (?:Grade: )?(\d+)", answer)
    return f"Grade: {ordered[1]}" if ordered else sound(reference, answer)


def reads_the_answer(reference: str, answer: str) -> str:
    """Repeats the answer, so that a grade in it may count."""
    return f"{sound(reference, answer)}\nThis is about: {answer}"


class Forgetful:
    """Rewards each answer only once."""

    def __init__(self) -> None:
        self.seen: Counter[tuple[str, str]] = Counter()

    def __call__(self, reference: str, answer: str) -> str:
        self.seen[reference, answer] += 1
        return sound(reference, answer) if self.seen[reference, answer] == 1 else "Grade: 0"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server: Any = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.seen.append((self.path, self.headers["Authorization"], body))
        asked = re.fullmatch(r"Reference: (.*?)\nAnswer:\n(.*)", body["messages"][0]["content"], re.DOTALL)
        assert asked is not None
        reply = server.judge(asked[1], asked[2])
        content = json.dumps({"choices": [{"message": {"role": "assistant", "content": reply}}]}).encode()
        self.send_response(server.status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Writes no log."""


@contextmanager
def judging(judge: Any) -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.judge, server.seen, server.status = judge, [], 200
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def section(server: Any, **more: Any) -> dict[str, Any]:
    """The environment section of that judge."""
    return {
        "id": "judge",
        "tasks": {"id": "reasoning_gym", "task": "chain_sum", "prompt": "compact"},
        "url": f"http://127.0.0.1:{server.server_address[1]}/v1",
        "model": "judge",
        "prompt": PROMPT,
        "verify": False,
    } | more
