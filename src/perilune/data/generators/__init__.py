"""Teachers: who writes training traces, found by name."""
