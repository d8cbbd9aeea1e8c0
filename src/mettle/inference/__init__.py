"""Serving a policy: the OpenAI API, a token-in/token-out route, and weights that change under running requests.

Parts: `config`; `engine/` (the embedded engine, the only part that imports torch); `server` and the routes beside it
(`generate`, `chat`, `completions`, `tokens`, `admin`); `bridge` (the engine's thread to the event loop); `process` (the
command). Invariant: a token leaves together with its log-probability and the version of the weights that sampled it.
"""
