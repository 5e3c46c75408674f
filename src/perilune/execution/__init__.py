"""The execution plane: runs a bundle somewhere and collects its results, whatever its task is."""
