"""Placements: where attempts run. `protocol` defines the interface that the others implement."""
