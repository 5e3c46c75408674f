"""The attempts of the sandbox audit. The source of each probe is sent into the sandbox.

A probe is a function of the audit's facts (paths, process ids and ports of the baits) that returns its
attempts by name. An attempt that returns something has reached what it should not. One that raises or returns
nothing was refused. A probe imports everything that it needs, because it runs alone.
"""
