"""A fake cloud over HTTP, whose machines are folders and processes of this machine, with injected faults.

`server` is the cloud's process; `inventory` and `machines` hold what it rents out; `box` is the first process
of each machine; `weather` injects faults; `client` is the provider.
"""
