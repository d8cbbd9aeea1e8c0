"""vLLM behind the engine seam: a server of its package as a child process, in an environment of its own.

Parts: `launch` (the child, from its command line to its first answer), `wire` (its routes), `spoken` (the tokens of one
choice and which weights sampled them), `engine` (the seam), `worker` (what runs inside vLLM's own processes; it imports
nothing of ours). Invariant: nothing that was sampled under weights that are not proven leaves the engine.
"""
