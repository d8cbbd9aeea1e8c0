"""Tasks to batches: dispatch, groups, staleness, credit, curriculum, evaluations.

Parts, in the order in which a task meets them: `curriculum` (which task next), `dispatcher` and `capacity` (how many
groups may be open), `source` (one group of rollouts), `algorithms`, `credit` and `services` (what its tokens are
credited with, and the frozen models asked for that), `admission` and `batcher` (which groups make the next batch),
`samples` (turns to token arrays), `shipping`, `loop` (all of it, step by step), `updater` and `policy` (which weights
the engine serves), `evaluation`, `recovery`, `simulator`.

Invariant: each task draw is dispatched, scored and shipped under the ledger, so a kill at any moment loses no task and
trains none twice; no shipped token is staler than `max_staleness`.
"""
