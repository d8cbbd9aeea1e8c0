"""Machines and judges in containers: what `docker` and `kubernetes` have in common.

    pool         a machine out of each container, its limits, files and end; `ContainerHost`, what a backend has to give
    judge        `SandboxPool` with containers as its cells
    grading      the grade, from what `probe.py` and `explorer.py` have found inside
    line         orders and answers over one stream to the agent; streams, the bytes of each command and port
    transports   how that stream is carried; bundle, the agent as one archive
    warm         containers made ahead of time; creation, none lost while it is made
    owners       whose a container is; faults, what can become of it; patience, waiting for who makes it

Invariant: no container outlives its owner's wish, and nothing from inside one is believed unchecked.
"""
