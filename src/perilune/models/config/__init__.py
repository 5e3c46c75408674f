"""The configuration of a decoder, read from config.json and written to it."""
