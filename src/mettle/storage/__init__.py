"""Storage: what a run keeps on disk, and the only code that writes it.

Parts: `run_dir` (the names of things), `ledger` and `journal` (the accounts and the diary, SQLite), `shards` (rollouts
with their tokens), `batches` (immutable files the trainer reads), `weights` (published policy versions), `checkpoints`
(two halves, one manifest).
Invariant: a file is complete the moment it has its final name.
"""
