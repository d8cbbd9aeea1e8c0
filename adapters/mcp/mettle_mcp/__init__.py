"""Tools of MCP servers.

Parts: `env` (the environment), `servers` (what to start or reach), `connection` (one server, for as long as it lives).
Invariant: mcp is imported when a server is first connected to.
"""
