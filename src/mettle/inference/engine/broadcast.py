"""Weights by collective: the publisher of a version broadcasts its tensors to all engines that want it at a moment.

They meet in a folder beside the versions, which both sides see: an engine leaves a wish (`want-ID.json`), the publisher
answers all wishes of a moment with an invitation to one group (`go-ID.json`: its store, each one's rank, the tensors),
and the tensors go from rank 0 to the others, over gloo between CPUs and NCCL between GPUs. A barrier at the end tells
the publisher that all have them. Parts: `receive`, `BroadcastGroup`, and the names of the files. The publisher's side
is `mettle.trainer.broadcast`.

This file imports nothing of ours: vLLM's worker processes get a copy of it. Invariant: whoever wants a version gets all
of it or None, and then reads the file, which is there as well.
"""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger(__name__)
_dist: Any = dist  # its stores and groups are not among what it says that it exports

ROOM = "broadcast"
"""The folder in which they meet, beside the versions."""
SENDER_FILE = "sender.json"
JOIN_S = 15.0
"""How long a wish waits for its invitation."""
GROUP_S = 60.0
"""How long a group may take to form, and each of its collectives."""
_LOOK_S = 0.005


class BroadcastGroup:
    """A process group for one broadcast. Raises: RuntimeError when a member does not come, or goes."""

    def __init__(self, store: Path, rank: int, size: int, backend: str, host: str) -> None:
        self._rank = rank
        timeout = timedelta(seconds=GROUP_S)
        shared = _dist.FileStore(str(store), size)
        shared.set_timeout(timeout)
        self._group: Any
        options: Any
        if backend == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())
            options = _dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = _dist.ProcessGroupNCCL(shared, rank, size, options)
        else:
            self.device = torch.device("cpu")
            options = _dist.ProcessGroupGloo._Options()
            options._devices = [_dist.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = timeout
            self._group = _dist.ProcessGroupGloo(shared, rank, size, options)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Rank 0's values into the others' tensors, in order."""
        options = _dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        for tensor in tensors:
            if tensor.numel():
                self._group.broadcast([tensor.reshape(-1).view(torch.uint8)], options).wait()
        self._group.barrier().wait()


def receive(folder: Path) -> dict[str, Tensor] | None:
    """All tensors of the version published in `folder`, from its publisher.

    None where it broadcasts nothing, does not answer, or the group fails: then there is the file.
    """
    room = folder.parent / ROOM
    if not (room / SENDER_FILE).exists():
        return None
    name = uuid.uuid4().hex
    wish, answer = room / f"want-{name}.json", room / f"go-{name}.json"
    try:
        write_whole(wish, {"version": folder.name})
        invitation = _wait_for(answer)
        if invitation is None:
            logger.warning("no broadcast of %s came; its file is read", folder.name)
            return None
        group = BroadcastGroup(
            Path(invitation["store"]), invitation["rank"], invitation["size"], invitation["backend"], invitation["host"]
        )
        state = {
            tensor: torch.empty(shape, dtype=getattr(torch, dtype), device=group.device)
            for tensor, dtype, shape in invitation["tensors"]
        }
        group.broadcast(state.values())
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        logger.warning("the broadcast of %s failed (%s); its file is read", folder.name, error)
        return None
    finally:
        for path in (wish, answer):
            path.unlink(missing_ok=True)
    logger.info("received %s by collective", folder.name)
    return state


def write_whole(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file that nobody sees half of."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(content))
    scratch.rename(path)


def _wait_for(path: Path) -> dict[str, Any] | None:
    deadline = time.monotonic() + JOIN_S
    while not path.exists():
        if time.monotonic() > deadline or not (path.parent / SENDER_FILE).exists():
            return None
        time.sleep(_LOOK_S)
    found: dict[str, Any] = json.loads(path.read_text())
    return found
