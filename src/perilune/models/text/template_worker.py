"""The child process that compiles one chat template and renders it. It reads and writes lines of JSON.

The process confines itself before it reads the template, because Jinja runs parts of a template during
compilation. The answer to the first request, {"source", "seconds"}, is {"ready"} or {"refused"}. Each further
request holds the inputs of the template, and its answer is {"text"} or {"failure"}.

Whitespace rules, `raise_exception`, `tojson` and `{% generation %}` follow Hugging Face transformers, so that
a template gives the same text in both. Only the date differs: `strftime_now` formats a fixed date, because
a prompt with the current date cannot be reproduced.
"""

import json
import os
import sys
from collections.abc import Mapping
from datetime import date
from typing import Any, BinaryIO, NoReturn

import jinja2
import jinja2.debug  # Jinja imports it at the first error, when the process can no longer read files
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from perilune.sandbox.confinement import confine, forbid_processes
from perilune.sandbox.limits import allow_cpu
from perilune.sandbox.own_root import library_folders

MEMORY_BYTES = 256 << 20  # limit on address space, in addition to that of Python and Jinja
MAX_CHARACTERS = 4 << 20  # maximum length of one rendered text
_MAX_REASON_CHARACTERS = 500
_DATE = date(2024, 7, 26)  # templates for Llama 3 use this date where `strftime_now` is missing


def main() -> None:
    """Serve requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    opening = json.loads(sys.stdin.buffer.readline())
    environment = _environment()
    _confine()
    allow_cpu(opening["seconds"])
    try:
        template = environment.from_string(opening["source"])
    except Exception as error:
        _send_answer(answers, {"refused": _error_text(error), "line": getattr(error, "lineno", None)})
        return
    _send_answer(answers, {"ready": True})
    for line in sys.stdin.buffer:
        allow_cpu(opening["seconds"])
        _send_answer(answers, _render(template, json.loads(line, object_hook=_Object)))


class _Object(dict[str, Any]):
    """A JSON object that can be appended to a text. DeepSeek's templates do so with arguments of calls."""

    def __radd__(self, text: str) -> str:
        return text + _to_json(self)


def _render(template: jinja2.Template, inputs: Mapping[str, Any]) -> dict[str, str]:
    try:
        text = template.render(inputs)
    except Exception as error:
        return {"failure": _error_text(error)}
    if len(text) > MAX_CHARACTERS:
        return {"failure": f"the text has {len(text):,} characters, more than {MAX_CHARACTERS:,}"}
    return {"text": text}


def _error_text(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:_MAX_REASON_CHARACTERS]


def _send_answer(answers: BinaryIO, document: Mapping[str, Any]) -> None:
    answers.write(json.dumps(document).encode() + b"\n")
    answers.flush()


def _confine() -> None:
    """Irreversibly give up files, processes, sockets, privileges and most memory."""
    confine(memory_bytes=MEMORY_BYTES, open_files=8, readable=library_folders())
    forbid_processes()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _format_date
    return environment


class _GenerationBlock(Extension):
    """Renders the contents of `{% generation %}...{% endgeneration %}`, which marks assistant text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Replace the block by its contents."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which would change the prompt.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _format_date(form: str) -> str:
    return _DATE.strftime(form)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
