"""Environments that others wrote, played by a model: gymnasium, reasoning-gym, TextArena, OpenEnv servers, MCP tools.

One file an adapter; `episodes` and `pace` are what the games among them share. Invariant: nothing here imports another
library before an environment of its kind is used; one that is missing is named with the extra that brings it.
"""
