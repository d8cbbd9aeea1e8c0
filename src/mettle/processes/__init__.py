"""Processes that this one starts: a run's, a command's, an environment's workers, a scorer's.

Parts: `child` (start, ask to end and then end, say how it ended), `fork_server` (a child begun with what another has
imported), `orphans` (dying with the parent), `managed` (a child that says when it is ready), `aside` (work on hostile
data, under limits of time and memory), `frames` (messages between the two over a pipe or a socket), `host` (the memory
that there is), `amx` (instructions that are announced and don't work), `clock` and `virtual_time` (time that can be
tested).
Invariant: no child outlives the process that started it, however that ends. `sandbox.zygote` stands apart: what runs
untrusted code imports nothing outside itself.
"""
