"""The server of `perilune serve`: a checkpoint behind OpenAI's HTTP API."""
