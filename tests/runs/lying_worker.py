"""`python lying_worker.py URL TOKEN FOLDER`: a worker from outside that takes the likeliest tokens, where it should draw.

Its logprobs are the right ones, and so is the form of what it says.
"""

import asyncio
import dataclasses
import sys
from pathlib import Path

from mettle.errors import MettleError
from mettle.inference.engine.protocol import Choice, GenerationRequest
from mettle.inference.outside.signatures import WorkerKey
from mettle.inference.outside.worker import OutsideClient, OutsideWorking, WorkPlace


async def main(url: str, token: str, folder: Path) -> None:
    working = OutsideWorking(
        OutsideClient(url, token, WorkerKey.of_file(folder / "key")), WorkPlace(folder, num_threads=1), print
    )

    async def greedy(request: GenerationRequest) -> list[Choice]:
        return await working.sampled(
            dataclasses.replace(request, params=dataclasses.replace(request.params, temperature=0.0))
        )

    working.sample = greedy
    await working.run()


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
    except MettleError as error:
        sys.exit(f"error: {error}")
