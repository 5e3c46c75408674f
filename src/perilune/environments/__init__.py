"""Where episodes happen: one protocol, adapters to the ecosystems."""
