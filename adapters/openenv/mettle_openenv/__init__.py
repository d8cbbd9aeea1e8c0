"""OpenEnv servers, played by a model.

Parts: `env` (the environment), `session` (one episode over a websocket), `server` (a local project, as a child
process).
"""
