"""A cloud that rents out folders and processes of this very machine, over HTTP, and fails like a real one.

`server` is the cloud, a process of its own; `machines` what it rents out; `box` the first process of each;
`weather` what goes wrong; `client` the provider that the control plane talks to.
"""
