"""What runs on a Ray cluster, as the package `perilune_ray`: the standard library and Ray alone."""
