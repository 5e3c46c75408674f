"""A checkpoint behind the HTTP interface of OpenAI: `perilune serve`."""
