"""What Mettle runs inside a container: process 1, which answers its owner over one stream. Standard library only.

    boot.py      from the container's first instruction to the agent, on standard streams or on a port
    server.py    the routes of a sandbox service, for one machine; commands.py, one command; files.py and ports.py,
                 its files and ports; faults.py, what is refused
    http.py      HTTP/1.1 and websockets; loop.py, coroutines; mux.py, many connections over the one stream
    cells.py     a cell in a container that is its own jail

It is packed, with `zygote/` and what both ends know of the wire, into an archive that `containers/bundle.py` makes.
"""
