"""The contract between the planes: layout, freezing, digests, provenance, verification."""
