"""What Mettle runs inside a container: process 1, which obeys its owner over a stream. Standard library only.

    boot.py      from the container's first instruction to the agent, on standard streams or on a port
    wire.py      frames in and out; seal.py authenticates each piece of a stream that crosses a network
    streams.py   numbered streams of frames, and the descriptors of the container that they end in
    machine.py   orders: commands, transfers, ports, and cells for the judge
    cells.py     a cell in a container that is its own jail

It is packed, with `zygote/`, into an archive that `containers/bundle.py` makes; nothing else of Mettle is in there.
"""
