"""What untrusted code tries, as the audit has it tried: each probe is sent into the sandbox as a text.

A probe is a function of the facts that the audit gives it (paths, process ids and ports of baits), and
returns its attempts by name. An attempt that returns something has reached what it should not; one that
raises, or returns nothing, was refused. A probe imports what it needs itself: it runs elsewhere, alone.
"""
