"""Real clouds, by SkyPilot: what it can rent, this can.

`settings` is what providers.yaml says; `client` the provider that the control plane talks to; `connection` a
process of the interpreter that has SkyPilot; `bridge` what runs there, the only file that imports it.
"""
