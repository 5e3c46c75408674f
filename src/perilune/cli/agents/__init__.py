"""Commands for software agents, and for the wiki of all runs: `perilune mcp` and `perilune wiki`."""

COMMANDS = {
    "wiki": ("agents.wiki:app", "Compile, check and search a wiki of all runs."),
    "mcp": ("agents.command:mcp", "Serve runs to software agents over MCP."),
}
