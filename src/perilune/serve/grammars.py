"""Constraints on answers: JSON that fits a schema, a pattern, one of several texts, or tool calls.

Constraints apply after any reasoning.
"""

import json
import re
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any

from perilune.engine.constraints import JSON_OPTIONS, Constraint, Constraints, format_alternatives
from perilune.errors import RequestError
from perilune.serve.errors import shorten
from perilune.serve.model import ServedModel
from perilune.serve.parts import THINK_END, THINK_START, Beginning
from perilune.serve.schema import ChatBody, Function, Sampling, StructuralTag
from perilune.serve.tool_formats import NAME

_CACHED_GRAMMARS = 64  # compiled grammars
_MAX_CHARS = 1 << 17  # characters of a grammar
_ESCAPED = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}  # in a pattern between slashes
_ONLY_ARGUMENTS = frozenset(("type", "properties", "required", "title", "description", "$schema", "$defs"))
_GAP = "GAP: /\\n{0,2}/\n"
_THOUGHT = "thought[lazy]: /(.|\\n)*" + THINK_END.replace("/", r"\/") + "/\n"
_ANY_TEXT = "TEXT: /(.|\\n)*/"

Schema = Mapping[str, Any]


class AnswerConstraints:
    """Makes the constraints of requests to one model."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._compiled = lru_cache(_CACHED_GRAMMARS)(self._compile)

    def make_constraint(self, body: Sampling, beginning: Beginning) -> Constraint:
        """Return the constraint on the answers to a request that `is_constrained`.

        Args:
            beginning: the kind of text at the start; the constraint applies after the reasoning.

        Raises:
            RequestError: when the request's format or tools cannot be enforced.
        """
        schemas: Mapping[str, Schema] = {}
        structured = body.structured_outputs
        where = "structured_outputs" if structured else "response_format"
        functions = body.forced_functions if isinstance(body, ChatBody) else []
        if isinstance(body, ChatBody) and functions:
            schemas = {function.name: _argument_schema(function) for function in functions}
            rules, where = self._call_rules(schemas, body.max_calls), "tools"
        elif structured and structured.regex:
            rules = f"answer: {_regex_rule(structured.regex)}"
        elif structured and structured.choice:
            rules = f"answer: {format_alternatives(structured.choice)}"
        elif structured and structured.grammar:
            rules = "answer: @answer"
        elif structured and structured.structural_tag:
            tag = structured.structural_tag
            schemas = {repr(structure.begin): structure.schema_ for structure in tag.structures}
            rules = self._tag_rules(tag)
        else:
            schemas = {"the schema": body.schema_document or {}}
            rules = f"answer: {_json_rule(body.schema_document or {})}"
        if len(rules) > _MAX_CHARS:
            raise RequestError(f"the constraint is longer than {_MAX_CHARS:,} characters", where=where)
        constraints = self._constraints  # outside `try`, because its errors do not concern the schema
        try:
            rules = self._start_rules(beginning, calls=bool(functions)) + rules
            return self._compiled(rules, structured.grammar if structured else None)
        except RequestError as error:
            if structured and structured.regex:
                constraints.regex(structured.regex)  # raises an error with the position in the expression
            raise _schema_error(constraints, schemas, where) or error from None

    def _start_rules(self, beginning: Beginning, *, calls: bool) -> str:
        """Return the start rule, which allows reasoning before the rule `answer`.

        Args:
            calls: whether the answer consists of calls; otherwise it is a final message.
        """
        if beginning == "content":
            return "start: answer\n"
        if beginning != "channels":
            is_token = THINK_END in self._model.tokenizer.control_tokens
            thought = f"thought: /(.|\\n)*/ {self._text_rule(THINK_END)}\n" if is_token else _THOUGHT
            begun = (
                f"({self._text_rule(THINK_START)} thought GAP)?" if beginning == "start" else "thought GAP"
            )
            return f"start: {begun} answer\n{thought}{_GAP}"
        analysis = self._text_rule("<|channel|>analysis<|message|>")
        final = "" if calls else self._text_rule("<|channel|>final<|message|>")
        end = self._text_rule("<|end|><|start|>assistant")
        return f"start: ({analysis} THOUGHT {end})? {final} answer\nTHOUGHT: /(.|\\n)*/\n"

    def _compile(self, rules: str, answer: str | None) -> Constraint:
        constraints = self._constraints
        return constraints.grammar(rules) if answer is None else constraints.nested_grammar(rules, answer)

    @cached_property
    def _constraints(self) -> Constraints:
        return Constraints(self._model.tokenizer, self._model.vocab_size, self._model.end_tokens)

    def _call_rules(self, schemas: Mapping[str, Schema], limit: int) -> str:
        """Return the rules of one to `limit` calls of functions with these schemas of arguments."""
        form = self._model.tool_format
        if form.spelling is None:
            raise RequestError(
                f"calls in the format {form.name} cannot be constrained",
                where="tool_choice",
                remedy="use tool_choice auto, or start the server with --tool-format hermes",
            )
        opening, before, between, after, separator, closing = map(self._text_rule, form.spelling)
        several = limit > 1 and not form.channels  # a call in a channel ends the answer
        more = f"({separator} call){{0,{limit - 1}}}" if several else ""
        items = schemas.items()
        calls = [f'{before} "{name}" {between} {_json_rule(schema)} {after}' for name, schema in items]
        return f"answer: {opening} call {more} {closing}\ncall: " + "\n  | ".join(calls)

    def _tag_rules(self, tag: StructuralTag) -> str:
        """Return the rules of free text in which each trigger begins a structure."""
        rules = [f"answer: ({' | '.join(f'tag_{i}' for i in range(len(tag.structures)))})* TEXT", _ANY_TEXT]
        for i, part in enumerate(tag.structures):
            trigger = tag.trigger(part) or ""
            rest, end = (json.dumps(text) if text else "" for text in (part.begin[len(trigger) :], part.end))
            rules.append(f"trigger_{i}[lazy]: TEXT {json.dumps(trigger)}")
            rules.append(f"tag_{i}: trigger_{i} {rest} {_json_rule(part.schema_)} {end}")
        return "\n".join(rules)

    def _text_rule(self, text: str) -> str:
        """Return the expression of a fixed text. Line breaks are optional, because chat templates differ."""
        control = self._model.tokenizer.control_tokens
        marks = "|".join(["\n", *map(re.escape, self._model.marks)])
        rules = []
        for part in re.split(f"({marks})", text):
            if part in control:
                rules.append(f"<[{control[part]}]>")
            elif part:
                rules.append(r"/\n?/" if part == "\n" else json.dumps(part))
        return " ".join(rules)


def _json_rule(schema: Schema) -> str:
    """Return the expression of JSON that matches a schema."""
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}"


def _regex_rule(pattern: str) -> str:
    """Return the expression of text that a regular expression matches as a whole."""
    escaped = re.sub(r"\\.|/|\n", lambda match: _ESCAPED.get(match[0], match[0]), pattern, flags=re.DOTALL)
    return f"/{escaped}/"


def _argument_schema(function: Function) -> Schema:
    """Return the schema of a function's arguments, which are an object.

    If a schema only lists arguments, the result excludes other arguments. JSON Schema would allow them, but
    the function does not have them.
    """
    name, schema = function.name, function.parameters
    if not re.fullmatch(NAME, name):
        raise RequestError(f"the function name {shorten(name)!r} does not match {NAME}", where="tools")
    if schema.get("type", "object") != "object":
        raise RequestError(f"the parameters of function {name!r} are not of type object", where="tools")
    closed = {} if schema.keys() - _ONLY_ARGUMENTS else {"additionalProperties": False}
    return {"type": "object", **schema, **closed}


def _schema_error(constraints: Constraints, schemas: Mapping[str, Schema], where: str) -> RequestError | None:
    """Return the error of the first schema that cannot be enforced."""
    for name, schema in schemas.items():
        try:
            constraints.json_schema(schema)
        except ValueError as error:  # also a number beyond 64 bits, or a lone surrogate
            what = error.what if isinstance(error, RequestError) else shorten(str(error))
            return RequestError(f"{name}: {what}", where=where)
    return None
