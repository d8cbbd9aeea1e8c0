"""Tasks of reasoning-gym, generated and verified by it.

Parts: `env` (the environment), `safe_answers` (what a verifier would execute, made harmless). Invariant: reasoning-gym
is imported when rows are first read.
"""
