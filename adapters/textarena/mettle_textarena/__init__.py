"""TextArena's games, played by a model.

Parts: `env` (the environment), `games` (one game and its randomness). Invariant: textarena is imported when a game
begins.
"""
