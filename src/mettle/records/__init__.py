"""Wire types: what the rooms hand to each other. Frozen, typed, no I/O.

Parts: `tasks` (task states, task draws, groups), `tokens` (samples, micro batches, batches), `versions` (policy
versions and their canary), `sampling` (how tokens are drawn). Invariant: nothing here imports another room.
"""
