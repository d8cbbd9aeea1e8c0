"""Machines and judges in containers: what `docker` and `kubernetes` have in common.

    agent        process 1 of a container: answers the wire of a sandbox service
    link         the one stream to an agent, and the service's client over it; transports, its connections
    machine      a service's machine that is a container
    pool         makes them, and measures what isolation they have; `ContainerHost`, what a backend has to give
    judge        `SandboxPool` with containers as its cells
    grading      the grade, from what `probe.py` and `explorer.py` have found inside
    bundle       the agent as one archive
    warm         containers made ahead of time; creation, none lost while it is made
    owners       whose a container is; errors, what can become of it; backoff, waiting for who makes it

Invariant: no container outlives its owner's wish, and nothing from inside one is believed unchecked.
"""
