"""Chat templates: the Jinja program in a checkpoint that turns a list of messages into one string.

A template comes with a checkpoint, so it is somebody else's code: it runs in Jinja's immutable sandbox
and sees nothing but the messages and the values passed to it. Whitespace rules, `raise_exception`,
`tojson` and `{% generation %}` follow the convention of Hugging Face transformers, so that a template
gives the same string in both. One deviation: `strftime_now` is not defined, because a prompt that
depends on the day cannot be reproduced; templates that ask for it have a fixed date to fall back on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from perilune.errors import RequestError


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the template's text.
        where: the file it came from, for messages.

    Raises:
        RequestError: when it is not valid Jinja, with file and line.
    """

    def __init__(self, source: str, *, where: str = "chat template") -> None:
        self.source = source
        self._where = where
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(
                f"chat template does not parse: {error.message}", where=f"{where}:{error.lineno}"
            ) from None

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Render `messages` ({"role", "content", ...} each); `variables` are the template's other inputs.

        Raises:
            RequestError: when the template refuses the messages, fails, or leaves the sandbox.
        """
        try:
            return self._template.render(messages=[dict(message) for message in messages], **variables)
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            RecursionError,
        ) as error:
            raise RequestError(
                f"chat template cannot render these messages: {error}",
                where=self._where,
                remedy="check the roles and their order against what the template accepts",
            ) from None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for masks; here it is its contents."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Replace the block by what it encloses."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which would change what the model reads.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
