"""A dataset by what a person calls it: a file, `env:NAME`, or a name on the Hugging Face hub.

Parts: `Dataset`, `open_dataset`. Invariant: the network is asked for a bounded time, and what it does not give is one
`UserError`.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mettle.errors import MettleError, UserError
from mettle.quality.data.files import SPLIT_NAMES, Splits, read_file
from mettle.quality.rewards.layouts import user_text

MAX_ROWS = 100_000
HUB_TIMEOUT_S = 120.0
CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Dataset:
    """Rows by split. `origin`: file, environment or hub."""

    name: str
    origin: str
    splits: Splits

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of the first split: what there is to look at."""
        return self.splits.get("train") or next(iter(self.splits.values()))


def open_dataset(
    name: str, *, config: str | None = None, split: str | None = None, max_rows: int = MAX_ROWS
) -> Dataset:
    """The dataset that `name` means.

    Raises: UserError when there is none, when it cannot be read, or when it has no such split.
    """
    if name.startswith("env:"):
        found = Dataset(name, "environment", _of_environment(name.removeprefix("env:"), max_rows))
    elif _is_path(name):
        found = Dataset(name, "file", read_file(Path(name), max_rows))
    else:
        found = Dataset(name, "hub", _of_hub(name, config, max_rows))
    if split is None:
        return found
    wanted = split if split in found.splits else SPLIT_NAMES.get(split, split)
    if wanted not in found.splits:
        raise UserError(f"{name} has no split {split!r}; it has {', '.join(found.splits)}")
    return Dataset(name, found.origin, {wanted: found.splits[wanted]})


def _is_path(name: str) -> bool:
    path = Path(name)
    return path.exists() or bool(path.suffix) or name.startswith((".", "/", "~"))


def _of_environment(env_id: str, max_rows: int) -> Splits:
    from mettle.envs.packages.loading import load_environment

    env = load_environment(env_id)
    splits: Splits = {}
    for split, rows in (("train", env.dataset), ("eval", env.eval_dataset)):
        if rows is not None:
            splits[split] = [_plain(row) for row in islice(rows, max_rows)]
    if not any(splits.values()):
        raise UserError(f"the environment {env_id!r} has no rows")
    return splits


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in row.items() if key not in ("prompt", "example_id")}
    return {"question": user_text(row), **kept} if "question" not in kept else kept


def _of_hub(name: str, config: str | None, max_rows: int) -> Splits:
    if not _is_hub_reachable():
        os.environ["HF_HUB_OFFLINE"] = "1"  # what was downloaded before is still found, and nothing is waited for
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise UserError(
            f"there is no file {name!r}, and a dataset of the hub needs: pip install 'mettle-lab[data]'"
        ) from error

    def load() -> Splits:
        loaded = datasets.load_dataset(name, config)
        return {
            SPLIT_NAMES.get(key, key): [dict(row) for row in islice(part, max_rows)] for key, part in loaded.items()
        }

    return within(HUB_TIMEOUT_S, load, f"{name!r} is no file here, and the Hugging Face hub")


def _is_hub_reachable() -> bool:
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "HF_HUB_OFFLINE")):
        return True  # a proxy, or the person, knows better
    hub = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    try:
        socket.create_connection((hub.hostname or "", hub.port or 443), timeout=CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def within(timeout_s: float, load: Callable[[], Splits], what: str) -> Splits:
    """What `load` gives within the time. Its thread ends with the process when it never comes back."""
    answers: queue.SimpleQueue[Splits | Exception] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put(load())
        except Exception as error:
            answers.put(error)

    threading.Thread(target=run, daemon=True, name="dataset").start()
    try:
        answer = answers.get(timeout=timeout_s)
    except queue.Empty:
        raise UserError(f"{what} did not answer within {timeout_s:g} s; give a file, or env:NAME") from None
    if isinstance(answer, MettleError):
        raise answer
    if isinstance(answer, Exception):
        first = (str(answer).splitlines() or [""])[0][:200]
        raise UserError(f"{what} gave no dataset: {type(answer).__name__}: {first}") from answer
    return answer
