"""Worker processes: an environment in processes of its own, so that what blocks, leaks or dies there stays there.

Parts: `frames` (the wire), `states` (rollouts on the wire), `endpoints` (which model a worker talks to), `worker` (the
process), `spawn` (starting one and asking for its rows), `process` (one worker at work, seen from here), `pool`
(several, replaced when they die), `environment` (a pool that looks like an environment); and for workers on other
machines `place` (what starts them there), `places` (where a pool has them started), `entrance` and `handshake`.
Invariants: only JSON and plain arrays cross, never code or pickles; a worker ends when the process that started it
does; a group whose worker dies is run again on another one, and fails with a `WorkerDied` after a few deaths.
"""
