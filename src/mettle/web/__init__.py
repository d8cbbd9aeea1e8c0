"""What every server of ours shares, and every client that asks one.

Parts: `server` (a socket, and uvicorn on it inside a running event loop), `app` (routes and what stands around them),
`doors` (who may ask: Host, Origin, secret), `bodies` (what is asked, within limits), `problems` (an error as an
answer), `streams` (events piece by piece), `figures` (Prometheus); `backoff` (asking again, for clients).
Invariant: whatever a request is, it gets one answer, and a handler whose client has gone is cancelled.
"""
