"""Chat templates: the Jinja program in a checkpoint that turns a list of messages into one string.

A template comes with a checkpoint, so it is an untrusted program. A child process without access to files,
sockets or privileges compiles and renders it within limits on time and memory (`template_worker.py`). One
process renders all prompts of a template; a process that hangs or dies is replaced. Models that Perilune
creates have no template and start no process.
"""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from perilune.errors import RequestError
from perilune.sandbox.channel import BrokenChannelError, Channel, KilledError

T = TypeVar("T")

_START_SECONDS = 60.0  # time limit to import Jinja and compile the template
_RENDER_SECONDS = 5.0  # limit on wall-clock time and on CPU time to render one text
_MAX_ANSWER_BYTES = 64 << 20  # the longest text with each character escaped as \uXXXX\uXXXX
_RENDERS_PER_REQUEST = 64  # maximum number of requests in the pipe


class ChatTemplate:
    """A compiled chat template.

    Args:
        where: the file of the template, for errors.

    Raises:
        RequestError: when it is not valid Jinja, with file and line.
    """

    def __init__(self, source: str, *, where: str = "chat template") -> None:
        self.source = source
        self._where = where
        with _starting:
            self._process = _processes.setdefault(source, _TemplateProcess(source))
        try:
            self._process.start()
        except (_TemplateRefusedError, BrokenChannelError) as error:
            line = f":{error.line}" if isinstance(error, _TemplateRefusedError) and error.line else ""
            raise RequestError(f"chat template does not parse: {error}", where=f"{where}{line}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
        """Render `messages` ({"role", "content", ...} each); `variables` are the template's other inputs.

        Raises:
            RequestError: as `render_all`.
        """
        return self.render_all([{**variables, "messages": messages}])[0]

    def render_all(self, inputs: Sequence[Mapping[str, Any]]) -> list[str]:
        """Render each set of inputs, which include `messages` and must be JSON values.

        Raises:
            RequestError: when the template refuses the messages, fails, tries to leave Jinja's sandbox, or
                takes too much time or memory.
        """
        try:
            return self._process.render(
                [{**item, "messages": [dict(message) for message in item["messages"]]} for item in inputs]
            )
        except (_TemplateRefusedError, BrokenChannelError, TypeError, ValueError, RecursionError) as error:
            raise RequestError(
                f"chat template cannot render these messages: {error}",
                where=self._where,
                remedy="check the roles and their order against what the template accepts",
            ) from None

    def interrupt(self) -> None:
        """Stop rendering that is in progress in another thread, which then gets an error."""
        self._process.interrupt()


class _TemplateRefusedError(Exception):
    """The template cannot be compiled, or fails on its inputs."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.line = line


class _TemplateProcess:
    """The child process of one template. It renders one request at a time, and is replaced when it dies."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._interrupted = False

    def start(self) -> None:
        """Start the process and compile the template, if that has not been done."""
        with self._lock:
            self._run_with_retry(self._started)

    def render(self, inputs: Sequence[Mapping[str, Any]]) -> list[str]:
        with self._lock:
            return self._run_with_retry(lambda: self._render(inputs))

    def interrupt(self) -> None:
        """Kill the process while another thread waits for it."""
        self._interrupted = True
        if (channel := self._channel) is not None:
            channel.kill()

    def _run_with_retry(self, action: Callable[[], T]) -> T:
        """Run `action`, and retry it once if another program, such as the OOM killer, killed the process."""
        self._interrupted = False
        try:
            return action()
        except KilledError:
            if self._interrupted:
                raise
            return action()

    def _render(self, inputs: Sequence[Mapping[str, Any]]) -> list[str]:
        texts: list[str] = []
        try:
            while len(texts) < len(inputs):
                texts += self._exchange(inputs[len(texts) : len(texts) + _RENDERS_PER_REQUEST])
        except _TemplateRefusedError:
            raise
        except BaseException:  # replace the process, because answers may still be in the pipe
            self._close()
            raise
        return texts

    def _exchange(self, inputs: Sequence[Mapping[str, Any]]) -> list[str]:
        channel = self._started()
        for item in inputs:
            channel.send(item)
        answers = [channel.receive(_RENDER_SECONDS) for _ in inputs]
        for answer in answers:
            if "failure" in answer:
                raise _TemplateRefusedError(str(answer["failure"]))
        return [str(answer["text"]) for answer in answers]

    def _started(self) -> Channel:
        if self._channel is None:
            channel = Channel(
                "perilune.models.text.template_worker", "the template's process", _MAX_ANSWER_BYTES
            )
            self._channel, self._end = channel, weakref.finalize(self, channel.close)
            channel.send({"source": self._source, "seconds": _RENDER_SECONDS})
            try:
                answer = channel.receive(_START_SECONDS)
            except BrokenChannelError:
                self._close()
                raise
            if "refused" in answer:
                self._close()
                raise _TemplateRefusedError(str(answer["refused"]), answer.get("line"))
        return self._channel

    def _close(self) -> None:
        if self._channel is not None:
            self._end()
            self._channel = None


# Equal templates share one process.
_processes: weakref.WeakValueDictionary[str, _TemplateProcess] = weakref.WeakValueDictionary()
_starting = threading.Lock()
