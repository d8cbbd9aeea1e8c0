"""Tasks in Harbor's format: a folder with an instruction, a world to work in, and tests that write the reward.

    tasks.py       a task folder as data
    dockerfile.py  what of a Dockerfile a machine can do: copy, run, set variables and the working directory
    servers.py     MCP servers that a task asks for
    verifier.py    the tests, in a machine that no process of the agent is in

`env.py` is the environment.
"""
