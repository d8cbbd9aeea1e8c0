"""The evaluation browser: environment, model, run, rollout, in a terminal.

Parts: `app` (the program), `screens/` (one file each), `record_table` and `transcript` (the two widgets that draw only
the lines that are seen), `selection`, `filters` and `search` (which rollouts, in which order), `overview` and
`details` (figures as text), `text` (what a model said, made safe to draw).
Invariants: nothing here knows how an evaluation is saved beyond `mettle.evals`; nothing that a model or an
environment said reaches the terminal except through `text`; only one rollout's conversation is in memory at a time.
"""
