"""Commands for software agents and for what runs have shown: `perilune mcp` and `perilune wiki`."""

COMMANDS = {
    "wiki": ("agents.wiki:app", "Compile, check and search a wiki of all runs."),
    "mcp": ("agents.command:mcp", "Serve runs to software agents over MCP."),
}
