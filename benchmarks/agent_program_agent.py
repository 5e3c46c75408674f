"""Agent of the package smolagents: the model writes Python, and the package runs it."""

import os
import sys

from smolagents import CodeAgent, OpenAIServerModel

model = OpenAIServerModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key="none")
agent = CodeAgent(tools=[], model=model, max_steps=2, verbosity_level=0)
agent.prompt_templates["system_prompt"] = "Write Python."  # the default has 8,000 characters
print(agent.run(sys.stdin.read()))
