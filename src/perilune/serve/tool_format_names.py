"""The names of the formats of tool calls, which the command line offers without loading the formats."""

from typing import Literal

ToolFormatName = Literal[
    "hermes",
    "mistral",
    "llama3_json",
    "pythonic",
    "qwen3_coder",
    "glm45",
    "deepseek_v3",
    "deepseek_v31",
    "kimi_k2",
    "openai",
]
