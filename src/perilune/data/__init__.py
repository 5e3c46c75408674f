"""Records, episodes, generators, filters and splits."""
