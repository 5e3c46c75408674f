"""Episodes as OpenTelemetry spans: valid protobuf, with the span tree of the episode."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perilune.data.episode import Episode
from perilune.data.spans import Span
from perilune.traces.otlp import trace_request


def episode(spans: tuple[Span, ...] = (), **more: Any) -> Episode:
    count = 4
    given = {
        "episode_id": "0/1/2", "group_id": "0/1", "task_id": "t", "environment": "e", "seed": 0,
        "messages": ({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}),
        "prompt_ids": np.arange(3, dtype=np.int32), "token_ids": np.arange(count, dtype=np.int32),
        "loss_mask": np.array([True, True, False, True]), "logprobs": np.zeros(count, np.float32),
        "policy_version": np.array([5, 5, -1, 5], np.int32), "finish_reason": "stop", "reward": 1.0,
        "metrics": {"turns": 2.0}, "spans": spans,
    }  # fmt: skip
    return Episode(**(given | more))


def agents() -> tuple[Span, ...]:
    asked = ({"role": "user", "content": "line"}, {"role": "assistant", "content": "B"})
    return (
        Span("0", "agent", (0, 2), -1, 5, 3, 5),
        Span("0.0", "ask", (1,), 2, 4, 1, 5, asked),
        Span("0.1", "ask", (1,), -1, 4, 1, 5, asked),
    )


def listed(request: dict[str, Any]) -> list[dict[str, Any]]:
    (resource,) = request["resourceSpans"]
    (scope,) = resource["scopeSpans"]
    return list(scope["spans"])


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    return {item["key"]: next(iter(item["value"].values())) for item in span["attributes"]}


def test_opentelemetry_protobuf_parses_the_request() -> None:
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    json_format = pytest.importorskip("google.protobuf.json_format")
    text = json.dumps(
        trace_request([episode(agents()), episode(failure="model: x", reward=None)], 7, "run", texts=True)
    )

    def in_base64(one: dict[str, Any]) -> dict[str, Any]:  # protobuf's JSON encodes bytes in base64
        ids = ("traceId", "spanId", "parentSpanId")
        return one | {key: base64.b64encode(bytes.fromhex(one[key])).decode() for key in ids if key in one}

    read = json_format.ParseDict(json.loads(text, object_hook=in_base64), service.ExportTraceServiceRequest())
    spans = read.resource_spans[0].scope_spans[0].spans
    assert len(spans) == 7 + 3 and len({span.trace_id for span in spans}) == 1
    assert all(len(span.trace_id) == 16 and len(span.span_id) == 8 for span in spans)
    assert spans[0].start_time_unix_nano == 7 and spans[0].end_time_unix_nano == 7 + 3 * 10**9
    assert spans[7].status.code == spans[7].status.STATUS_CODE_ERROR and spans[7].status.message == "model: x"


def test_turns_belong_to_agents_and_link_to_joined_sub_agents() -> None:
    spans = listed(trace_request([episode(agents())], 0, "run", texts=False))
    by_id = {span["spanId"]: span for span in spans}
    assert len(by_id) == len(spans)
    (root,) = (span for span in spans if "parentSpanId" not in span)
    assert root["name"] == "invoke_agent agent" and attributes(root)["perilune.reward"] == 1.0
    asked = [span for span in spans if span["name"] == "invoke_agent ask"]
    assert [span["parentSpanId"] for span in asked] == [root["spanId"]] * 2
    chats = [span for span in spans if span["name"] == "chat"]
    assert [by_id[span["parentSpanId"]]["name"] for span in chats] == [
        "invoke_agent agent", "invoke_agent agent", "invoke_agent ask", "invoke_agent ask",
    ]  # fmt: skip
    assert [[link["spanId"] for link in one["links"]] for one in chats] == [[], [asked[0]["spanId"]], [], []]
    assert attributes(chats[1])["perilune.round"] == "2"
    assert "line" not in json.dumps(spans)


def test_texts_are_included_on_request() -> None:
    spans = listed(trace_request([episode(agents())], 0, "run", texts=True))
    (message,) = json.loads(attributes(spans[-1])["gen_ai.output.messages"])
    assert message == {"role": "assistant", "parts": [{"type": "text", "content": "B"}]}
    assert "line" in attributes(spans[-2])["gen_ai.input.messages"]


def test_episode_without_sub_agents_has_one_span_per_turn() -> None:
    spans = listed(trace_request([episode()], 0, "run", texts=False))
    assert [span["name"] for span in spans] == ["invoke_agent agent", "chat", "chat"]
    assert attributes(spans[0])["gen_ai.usage.output_tokens"] == "3"
    assert attributes(spans[0])["gen_ai.usage.input_tokens"] == "4"


def test_traces_export_writes_the_episodes_of_a_run(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from perilune.cli.main import app
    from perilune.data.episodes_file import write_episodes

    folder = tmp_path / "attempt"
    (folder / "artifacts" / "episodes").mkdir(parents=True)
    for step in range(2):  # with different episodes of the same id
        file = folder / "artifacts" / "episodes" / f"step-{step:06}.parquet"
        write_episodes(file, [episode(agents(), reward=float(step))])
    (folder / "job.json").write_text("{}")
    out = tmp_path / "spans.json"
    done = CliRunner().invoke(app, ["traces", "export", str(folder), "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {"episodes": 2, "file": str(out), "spans": 14}
    requests = [{"resourceSpans": [one]} for one in json.loads(out.read_text())["resourceSpans"]]
    spans = [span for request in requests for span in listed(request)]
    assert len({span["spanId"] for span in spans}) == 14 and len({span["traceId"] for span in spans}) == 2
