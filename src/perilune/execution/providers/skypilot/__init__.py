"""Real clouds through SkyPilot.

`skypilot_settings` is its section of providers.yaml; `client` the provider; `connection` a process of the
interpreter that has SkyPilot; `bridge` the script in that process, the only file that imports SkyPilot.
"""
