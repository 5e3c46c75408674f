"""The environment `mcp`: the policy uses the tools of an MCP server. Each episode starts its own server.

The first observation lists the tools and asks the task. A turn with tool calls gets their results; a turn
without is the answer, which the environment of `tasks` scores. An episode is reproducible if the server's
results are functions of the calls so far. With a tool that reads a clock or a network, it is not.
"""

import json
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any, Literal

from pydantic import Field

from perilune.data.tool_calls import describe_tools, read_calls
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.multi_turn import EpisodeGenerator
from perilune.environments.core.protocol import EpisodeFailedError, Message, Observation, Task
from perilune.environments.program.launched import LaunchedEnvironment, LaunchSpec
from perilune.environments.program.mcp_server import ToolServer, ToolServerError
from perilune.sandbox.programs import Ending

_MALFORMED = 'error: a tool call is <tool_call>{"name": NAME, "arguments": {...}}</tool_call>'


class McpSpec(LaunchSpec):
    """The environment section of a recipe, for `id: mcp`."""

    id: Literal["mcp"] = Field("mcp", description="id of the environment")
    turns: int = Field(8, ge=1, le=1000, description="maximum turns of an episode")
    output: int = Field(2000, ge=1, description="characters of a tool's result that the policy sees")


class McpEnvironment(LaunchedEnvironment):
    """Tasks with the tools of one server. A server that cannot start or list its tools is a failure."""

    Spec = McpSpec

    def __init__(self, spec: McpSpec, sections: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__("mcp", spec, sections)
        self.spec = spec
        self.max_turns = spec.turns

    def play(self, task: Task, rng: KeyedRandom) -> EpisodeGenerator:
        endings: SimpleQueue[Ending] = SimpleQueue()
        server = ToolServer(lambda streams: self.start(task, streams, endings.put), self.spec.seconds)
        calls = 0.0
        try:
            server.initialize()
            tools: Message = {"role": "system", "content": describe_tools(server.tools())}
            action = yield Observation((tools, *self.prompt(task)))
            while (parsed := read_calls(action)) is None or parsed[1]:
                results = [_MALFORMED] if parsed is None else []
                for name, arguments in parsed[1] if parsed else ():
                    calls += 1
                    results.append(server.call(name, json.loads(arguments))[: self.spec.output])
                messages = tuple({"role": "tool", "content": text} for text in results)
                action = yield Observation(messages, metrics={"calls": calls})
            end = self.end_with_answer(task, action, {"calls": calls})
        except ToolServerError as error:
            if not calls:
                server.program.end()
                last = endings.get().errors.strip().splitlines()[-1:]
                raise EpisodeFailedError("environment", ": ".join([str(error), *last])) from None
            end = self.end_crashed(str(error), "tools", is_data=True)
        finally:
            server.close()
        yield end
