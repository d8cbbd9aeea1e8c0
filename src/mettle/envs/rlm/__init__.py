"""Recursive language models: a model that works on its context with code, and asks other models from that code.

Parts: `env` (`RLMEnv`), `bridge` (how code in the sandbox calls functions of this process), `guest` (its other end, run
inside), `repl` (the Python or the shell in which the model's code runs), `sub_models` (the models that the code asks),
`context_files` (the context as files), `metrics`. Invariant: code of a model runs in the rollout's sandbox, tools and
models are reached through its bridge only.
"""
