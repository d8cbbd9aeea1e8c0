"""Sandboxes behind HTTP, so that a pool can live on another machine: `mettle sandbox serve`.

    app.py          the routes and what stands around each of them; server.py binds it, and ends it in good order
    certificates.py its TLS
    config.py       settings, limits and quotas; settings.py, from files and words; state.py, what the routes share
    tokens.py       who may come in; quotas.py, how much each may have
    machines.py     the machines of all clients: owners, labels, jobs; leases.py, clients that are still there
    commands.py, transfers.py, ports.py (relay.py), judging.py, census.py    what the routes do
    bodies.py       reading a request within its limits; idle_connections.py, those on which nothing is asked
    idempotency.py  a request with a key is carried out once, however often it is sent
    wire.py, faults.py    values and errors on their way; the client reads them with the same code
    prime.py        the calls of the open-source `prime` clients for the same things; gateway.py, their data plane
    metrics.py      the page for Prometheus
    local.py        a service of one's own, started on demand and gone when idle

Invariant: everything that a client has is counted against its token and ends with the client, or with the service.
"""
