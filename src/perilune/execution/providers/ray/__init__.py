"""A Ray cluster as a provider of machines: each is an actor that one Ray Job of ours holds.

`client` is the provider, `jobs` Ray's HTTP interface, `host` the way to a machine, and what lies in `cluster`
travels there with every job. Nothing of Ray is imported here, so that neither Ray nor its version matters on
this machine, and nothing that comes from a cluster is ever unpickled.
"""
