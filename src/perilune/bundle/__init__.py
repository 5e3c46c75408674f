"""Bundles: layout, freezing, digests, provenance and verification. Both planes depend on this package."""
