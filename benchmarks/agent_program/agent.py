"""An agent written with the package openai-agents, as its documentation shows: a tool, an agent, a run."""

import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

set_tracing_disabled(True)
set_default_openai_api("chat_completions")


@function_tool
def multiply(a: int, b: int) -> str:
    """Multiply."""
    return f"{a * b}"


agent = Agent(name="agent", model="policy", tools=[multiply])
print(Runner.run_sync(agent, sys.stdin.read(), max_turns=4).final_output)
