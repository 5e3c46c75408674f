"""The checks of every `rl` stage; docs/explanation/checks.md lists them."""
