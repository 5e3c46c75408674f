"""Commands for software agents: the tools of `perilune mcp`."""

COMMANDS = {"mcp": ("agents.command:mcp", "Serve runs to software agents over MCP.")}
