"""What the user writes: a typed YAML recipe becomes validated stages."""
