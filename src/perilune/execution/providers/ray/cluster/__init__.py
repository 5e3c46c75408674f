"""Code that runs on a Ray cluster as the package `perilune_ray`, with only the standard library and Ray."""
