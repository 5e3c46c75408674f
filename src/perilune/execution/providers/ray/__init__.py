"""A Ray cluster as a provider: each machine is an actor, held by a Ray Job of Perilune.

`client` is the provider, `jobs` Ray's HTTP API, `host` runs commands on a machine, and `cluster` is sent to
the cluster with every job. Ray is never imported on this machine, so its version does not matter here, and
data from a cluster is never unpickled.
"""
