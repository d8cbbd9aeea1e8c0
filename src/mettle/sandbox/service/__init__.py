"""Sandboxes behind HTTP, so that a pool can live on another machine: `mettle sandbox serve`.

    app.py          the routes and what stands around each of them; routes/, what they do; server.py starts and ends it
    bodies.py       what is asked, as models; uploads.py, what comes as files; answers.py, what is answered
    certificates.py its TLS
    config.py       settings, limits and quotas; settings.py, from files and words; state.py, what the routes share
    tokens.py       who may come in; quotas.py, how much each may have
    machines.py     the machines of all clients: owners, labels, jobs; leases.py, clients that are still there
    idempotency.py  a request with a key is carried out once, however often it is sent
    wire.py, faults.py    values and errors on their way; relay.py, ports; the client reads them with the same code
    metrics.py      the page for Prometheus
    local.py        a service of one's own, started on demand and gone when idle
    client/         the other end: the backend `remote`

Invariant: everything that a client has is counted against its token and ends with the client, or with the service.
"""
