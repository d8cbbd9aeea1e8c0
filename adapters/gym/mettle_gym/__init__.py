"""gymnasium environments, and classes with that interface, played by a model.

Parts: `env` (the environment). Invariant: gymnasium is imported when an id of its registry is asked for.
"""
