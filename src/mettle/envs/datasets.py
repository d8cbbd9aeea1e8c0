"""Well-known datasets as rows of `question` and `answer`, from the Hugging Face hub or, without a network, a stand-in.

Parts: `load_example_dataset`, `SOURCES` (where each is and how a row of it reads). The stand-ins, written by
`offline_rows`, have the same columns and the same form of answer, and nothing else in common with the dataset.
Invariants: a stand-in says so in each row's `source`, in a log line, and in the dataset's description; looking for the
network takes seconds and happens once per process; nothing is imported or asked before the call.
"""

from __future__ import annotations

import importlib.util
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from mettle.clients.errors import one_line
from mettle.envs.offline_rows import offline_rows
from mettle.envs.parsers.answers import extract_boxed_answer, extract_hash_answer
from mettle.envs.rows import Rows
from mettle.errors import UserError

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]
NETWORK_TIMEOUT_S = 3.0
NUM_OFFLINE_ROWS = 200
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class Source:
    """A dataset of the hub. `configs` are concatenated; `is_wanted` chooses rows; `read` gives question and answer."""

    path: str
    read: Callable[[Row, int], tuple[str, str]]
    split: str = "train"
    configs: tuple[str | None, ...] = (None,)
    is_wanted: Callable[[Row], bool] | None = None


def load_example_dataset(
    name: str = "gsm8k", split: str | None = None, n: int | None = None, seed: int = 0, *, offline: bool | None = None
) -> Any:
    """The dataset `name`: `n` rows of it in the order of `seed`, or all of them in their own order.

    `offline` True gives the stand-in, False the dataset or an error; None the dataset where it can be reached or was
    fetched before, else the stand-in. Returns a Hugging Face dataset where that library is installed, else `Rows`.

    Raises: UserError when there is no such name or split, or when `offline` is False and the dataset cannot be had.
    """
    source = SOURCES.get(name)
    if source is None:
        raise UserError(f"there is no example dataset {name!r}; there are {', '.join(SOURCES)}")
    if offline is None and importlib.util.find_spec("datasets") is None:
        offline, reason = True, "the library for it is not installed (pip install 'mettle-lab[data]')"
    else:
        reason = "this was asked for"
    if not offline:
        try:
            return _sample(_fetched(name, source, split or source.split), n, seed)
        except UserError as error:
            if offline is False:
                raise
            reason = str(error)
    logger.warning("offline stand-in for %s, made by Mettle and not from that dataset: %s", name, reason)
    return _sample(_stand_in(name, split or source.split), n, seed)


def _sample(dataset: Any, n: int | None, seed: int) -> Any:
    if n is None or n <= 0:
        return dataset
    return dataset.shuffle(seed=seed).select(range(min(n, len(dataset))))


def _fetched(name: str, source: Source, split: str) -> Any:
    """The real dataset.

    Raises: UserError when it cannot be had.
    """
    if importlib.util.find_spec("datasets") is None:
        raise UserError(f"{name} is fetched by the datasets library; pip install 'mettle-lab[data]'")
    import datasets

    try:
        with _offline_unless_reachable():
            parts = [datasets.load_dataset(source.path, config, split=split) for config in source.configs]
    except Exception as error:  # the library raises whatever its many ways of fetching raise
        raise UserError(
            f"{name} ({source.path}, split {split}) cannot be had: {one_line(str(error), 160)}; "
            "offline=True gives a stand-in"
        ) from error
    dataset = datasets.concatenate_datasets(parts) if len(parts) > 1 else parts[0]
    if source.is_wanted is not None:
        dataset = dataset.filter(source.is_wanted)

    def as_row(row: Row, index: int) -> dict[str, str]:
        question, answer = source.read(row, index)
        return {"question": question, "answer": answer}

    kept = [column for column in dataset.column_names if column in ("question", "answer")]
    return dataset.map(as_row, with_indices=True, remove_columns=[c for c in dataset.column_names if c not in kept])


def _stand_in(name: str, split: str) -> Any:
    rows = offline_rows(name, NUM_OFFLINE_ROWS, random.Random(f"{name} {split}"))
    marked = [{**row, "source": f"offline stand-in, not {name}"} for row in rows]
    if importlib.util.find_spec("datasets") is None:
        return Rows.from_list(marked)
    import datasets

    info = datasets.DatasetInfo(
        description=f"An offline stand-in made by Mettle. Not {name}, and not comparable to it."
    )
    return datasets.Dataset.from_list(marked, info=info)


@contextmanager
def _offline_unless_reachable() -> Iterator[None]:
    """Let the hub's library use what was fetched before, and not wait for a network that is not there."""
    import datasets
    import huggingface_hub.constants as hub

    before = hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    is_offline = any(before) or not _is_reachable(hub.ENDPOINT)
    hub.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = is_offline
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


@cache
def _is_reachable(endpoint: str) -> bool:
    import urllib.error
    import urllib.request

    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=NETWORK_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return True  # whatever it says, it is there
    except (OSError, ValueError):
        return False
    return True


def _plain(question: str, answer: str) -> Callable[[Row, int], tuple[str, str]]:
    return lambda row, index: (row[question], str(row[answer]))


def _number(question: str, answer: str) -> Callable[[Row, int], tuple[str, str]]:
    return lambda row, index: (row[question], str(int(row[answer])))


def _choices(question: str, options: list[str]) -> str:
    return f"Question: {question}\n\n" + "\n".join(f"{LETTERS[i]}: {text}" for i, text in enumerate(options))


def _gpqa(row: Row, index: int) -> tuple[str, str]:
    """The right answer comes first in the dataset, so the options are put in an order that depends on the row."""
    options = [row["Correct Answer"], *(row[f"Incorrect Answer {i}"] for i in (1, 2, 3))]
    order = random.Random(index).sample(range(4), 4)
    return _choices(row["Question"], [options[i] for i in order]), LETTERS[order.index(0)]


def _openbookqa(row: Row, index: int) -> tuple[str, str]:
    pairs = zip(row["choices"]["label"], row["choices"]["text"], strict=True)
    listed = "\n".join(f"{label}. {text}" for label, text in pairs)
    return f"Question: {row['question_stem']}\n\nChoices:\n{listed}", row["answerKey"]


def _is_python(row: Row) -> bool:
    return "python" in str(row["prompt"])[:200].lower()


_GPQA, _OPENRS = "Idavidrein/gpqa", "knoveleng/open-rs"
SOURCES: dict[str, Source] = {
    "aime2024": Source("HuggingFaceH4/aime_2024", _number("problem", "answer")),
    "aime2025": Source("opencompass/AIME2025", _plain("question", "answer"), "test", ("AIME2025-I", "AIME2025-II")),
    "amc2023": Source("knoveleng/AMC-23", _plain("problem", "answer")),
    "gpqa_diamond": Source(_GPQA, _gpqa, configs=("gpqa_diamond",)),
    "gpqa_main": Source(_GPQA, _gpqa, configs=("gpqa_main",)),
    "gsm8k": Source(
        "openai/gsm8k", lambda row, _: (row["question"], extract_hash_answer(row["answer"])), "test", ("main",)
    ),
    "math": Source(
        "chiayewken/competition_math", lambda row, _: (row["problem"], extract_boxed_answer(row["solution"]))
    ),
    "math500": Source("HuggingFaceH4/MATH-500", _plain("problem", "answer"), "test"),
    "mmlu": Source(
        "cais/mmlu", lambda row, _: (_choices(row["question"], row["choices"]), LETTERS[row["answer"]]), "dev", ("all",)
    ),
    "mmlu_pro": Source(
        "TIGER-Lab/MMLU-Pro", lambda row, _: (_choices(row["question"], row["options"]), row["answer"]), "validation"
    ),
    "openbookqa": Source("allenai/openbookqa", _openbookqa, configs=("main",)),
    "openrs": Source(_OPENRS, _plain("problem", "answer")),
    "openrs_easy": Source(_OPENRS, _plain("problem", "answer"), is_wanted=lambda row: row["level"] == "Easy"),
    "openrs_hard": Source(_OPENRS, _plain("problem", "answer"), is_wanted=lambda row: row["level"] == "Hard"),
    "prime_code": Source(
        "PrimeIntellect/verifiable-coding-problems", _plain("prompt", "verification_info"), is_wanted=_is_python
    ),
}
