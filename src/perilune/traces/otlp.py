"""Episodes as OpenTelemetry spans, by the semantic conventions for generative AI (version 1.41).

An episode is a trace. The player and each sub-agent are spans `invoke_agent`, and their turns are spans
`chat`. A turn that received the result of a sub-agent links to its span. A round takes one second: turns that
were sampled together have the same time. The encoding is the JSON of OTLP, with ids in hexadecimal.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from perilune.data.episode import Episode
from perilune.data.spans import Span

_ROUND_NS = 1_000_000_000
_INTERNAL, _CLIENT = 1, 3  # SpanKind
OK, ERROR = 1, 2  # StatusCode


def trace_request(episodes: Iterable[Episode], begin: int, source: str, *, texts: bool) -> dict[str, Any]:
    """Return an ExportTraceServiceRequest with the spans of the episodes.

    Args:
        begin: time of the first round of each episode, in nanoseconds since 1970.
        source: digest of the file with the episodes, whose ids are unique only in this file.
        texts: whether the spans contain the messages.
    """
    spans = [span for episode in episodes for span in _episode_spans(episode, begin, source, texts)]
    return export_request(spans)


def export_request(spans: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return an ExportTraceServiceRequest with the spans."""
    scope = {"name": "perilune", "version": version("perilune")}
    resource = {"attributes": encode_attributes({"service.name": "perilune"})}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": scope, "spans": list(spans)}]}]}


def _episode_spans(episode: Episode, begin: int, source: str, texts: bool) -> Iterator[dict[str, Any]]:
    spans = episode.spans or (_player_span(episode),)
    own = f"{source} {episode.episode_id}"
    trace = _hex_digest(own, 32)
    shared = {"gen_ai.conversation.id": episode.episode_id, "gen_ai.provider.name": "perilune"}
    conversations = {span.span_id: span.messages or episode.messages for span in spans}
    for span in spans:
        children = [child for child in spans if child.parent == span.span_id]
        agent: dict[str, Any] = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": span.name,
            "gen_ai.usage.input_tokens": span.prompt_tokens,
            "gen_ai.usage.output_tokens": span.tokens,
            "perilune.policy_version": span.policy_version,
        }
        if not span.parent:
            agent |= _outcome_attributes(episode)
        if texts and span.messages:
            agent["gen_ai.input.messages"] = _encode_messages(span.messages[:1])
        agent_span: dict[str, Any] = {
            "traceId": trace,
            "spanId": _hex_digest(f"{own} {span.span_id}", 16),
            "name": f"invoke_agent {span.name}",
            "kind": _INTERNAL,
            "startTimeUnixNano": str(begin + max(span.begin, 0) * _ROUND_NS),
            "endTimeUnixNano": str(begin + max(span.end, 0) * _ROUND_NS),
            "attributes": encode_attributes(shared | agent),
            "status": {"code": ERROR, "message": episode.failure}
            if episode.failure and not span.parent
            else {"code": OK},
        }
        if span.parent:
            agent_span["parentSpanId"] = _hex_digest(f"{own} {span.parent}", 16)
        yield agent_span
        answers = [message for message in conversations[span.span_id] if message["role"] == "assistant"]
        for number, round_index in enumerate(span.rounds):
            turn = {"gen_ai.operation.name": "chat", "perilune.round": round_index}
            answer = answers[number - len(span.rounds)] if len(answers) >= len(span.rounds) else None
            if texts and answer is not None:
                turn["gen_ai.output.messages"] = _encode_messages([answer])
            yield {
                "traceId": trace,
                "spanId": _hex_digest(f"{own} {span.span_id} {number}", 16),
                "parentSpanId": agent_span["spanId"],
                "name": "chat",
                "kind": _CLIENT,
                "startTimeUnixNano": str(begin + round_index * _ROUND_NS),
                "endTimeUnixNano": str(begin + (round_index + 1) * _ROUND_NS),
                "attributes": encode_attributes(shared | turn),
                "links": [
                    {"traceId": trace, "spanId": _hex_digest(f"{own} {child.span_id}", 16)}
                    for child in children
                    if child.joined == round_index
                ],
                "status": {"code": OK},
            }


def _player_span(episode: Episode) -> Span:
    """Return the span of an episode without sub-agents: one round for each turn."""
    turns = int(episode.metrics.get("turns", 1))
    return Span(
        span_id=str(episode.player),
        name="agent",
        rounds=tuple(range(turns)),
        joined=-1,
        prompt_tokens=len(episode.prompt_ids) + len(episode.token_ids) - episode.sampled,
        tokens=episode.sampled,
        policy_version=int(episode.policy_version.max(initial=-1)),
    )


def _outcome_attributes(episode: Episode) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "perilune.environment": episode.environment,
        "perilune.task_id": episode.task_id,
        "perilune.finish_reason": episode.finish_reason,
    }
    if episode.reward is not None:
        attributes["perilune.reward"] = float(episode.reward)
    if episode.failure:
        attributes["error.type"] = episode.failure.partition(":")[0]
    return attributes


def _encode_messages(messages: Sequence[Mapping[str, str]]) -> str:
    parts = [
        {"role": item["role"], "parts": [{"type": "text", "content": item["content"]}]} for item in messages
    ]
    return json.dumps(parts, ensure_ascii=False)


def encode_attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the values in the form of AnyValue; 64-bit integers are strings."""
    kinds = {str: "stringValue", int: "intValue", float: "doubleValue"}
    return [
        {"key": key, "value": {kinds[type(value)]: str(value) if isinstance(value, int) else value}}
        for key, value in values.items()
    ]


def _hex_digest(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:digits]
