"""Workers from outside that sample for a run and are not trusted.

    worker (anywhere)                    │ the run's inference process
    fetches weights by hash  ◄───────────┤ door: facts, files, leases; every word is signed
    leases groups, samples them          │   │
    submits tokens and logprobs ─────────┼─► checks: form, then the same tokens prefilled and drawn again
                                         │   │ as if its own engine had sampled them
                                         │   ▼
                                         │ OutsideEngine: the engine seam of the run

Parts: `config`; `leases` (who has which request, by a monotonic clock), `roster` (who they are, and who was banned),
`signatures`, `checks` (pure), `auditor` (the trusted engine that draws again), `engine` (all of it behind the one
seam), `door` (HTTP), `files` (weights as hashed pieces), `relays` (who hands them on); `worker` (the other side).
Invariant: a worker decides nothing but when it answers: what it may answer follows from the weights, the prompt and the
seed that it was given.
"""
