"""What do relays spare a run whose workers from outside all fetch a version at once, and how soon do all have it?

    PYTHONPATH=src python benchmarks/outside_relays.py

The real `Relays` of each worker on a simulated network: the run and each worker send one piece at a time, all equally
fast (10 ms a piece), and a word takes 2 ms. The numbers that matter are ratios to one copy.
"""

from __future__ import annotations

import asyncio
import hashlib
import time

from mettle.inference.outside.files import WantedPiece
from mettle.inference.outside.relays import RUN, PieceAnswer, Relays

PIECE_S, WORD_S, SIZE = 0.010, 0.002, 8 << 20
FOLDER = [WantedPiece(hashlib.sha256(bytes([n])).hexdigest(), "model.safetensors", n * SIZE, SIZE) for n in range(60)]


async def fetch_all(num_workers: int, *, has_relays: bool) -> tuple[float, float]:
    """Copies that the run has sent, and for how many times that one copy takes the last worker has waited."""
    names = [f"http://10.0.0.{number}:7300" for number in range(num_workers)]
    has: dict[str, set[str]] = {name: set() for name in names}
    senders = {name: asyncio.Lock() for name in (RUN, *names)}
    num_from_run = 0

    async def ask(base: str, piece: WantedPiece, limit_s: float) -> PieceAnswer:
        nonlocal num_from_run
        await asyncio.sleep(WORD_S)
        if base != RUN and piece.digest not in has[base]:
            return PieceAnswer(fault="absent")
        async with senders[base]:
            await asyncio.sleep(PIECE_S)
        num_from_run += base == RUN
        return PieceAnswer(b"a piece")

    async def work(name: str) -> None:
        relays = Relays(ask, name)
        relays.know(names if has_relays else ())
        async for piece, _ in relays.pieces(FOLDER):
            has[name].add(piece.digest)

    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(work(name))
    return num_from_run / len(FOLDER), (time.monotonic() - began) / (PIECE_S * len(FOLDER))


def main() -> None:
    print("| workers | copies from the run | without relays | time | without relays |")
    print("|---|---|---|---|---|")
    for number in (1, 2, 4, 8, 16):
        copies, took = asyncio.run(fetch_all(number, has_relays=True))
        copies_alone, took_alone = asyncio.run(fetch_all(number, has_relays=False))
        print(f"| {number} | {copies:.1f} | {copies_alone:.0f} | {took:.1f} | {took_alone:.1f} |")


if __name__ == "__main__":
    main()
