"""An MCP server of the package mcp, with tools that remember, crash and hang."""

import os
import sys
import time

from mcp.server.fastmcp import FastMCP

server = FastMCP("notes", log_level="ERROR")
notes: list[str] = []


@server.tool()
def add(a: int, b: int) -> int:
    """The sum."""
    return a + b


@server.tool()
def note(text: str) -> str:
    """Keep a note, and list all."""
    notes.append(text)
    return ",".join(notes)


@server.tool()
def crash() -> str:
    """End the server."""
    print("it was asked to", file=sys.stderr)
    os._exit(3)


@server.tool()
def hang() -> str:
    """Take a minute."""
    time.sleep(60)
    return ""


if os.environ.get("MODE") == "broken":
    sys.exit("no notes today")
server.run()
