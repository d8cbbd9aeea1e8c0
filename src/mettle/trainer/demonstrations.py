"""Demonstrations: chats whose last answer is to be imitated, as token arrays with a mask.

Which tokens train is known from where they came from, never guessed from the text: an assistant turn is what the chat
template adds to the prompt that asks for it, up to and with its end token. Only the turns after the last user message
train, so few-shot examples and earlier answers are context.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mettle.clients.renderer import Renderer
from mettle.errors import UserError
from mettle.records.tokens import Batch, BoolArray, IntArray, filled
from mettle.storage.files import storage_errors


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One chat's ids, and which of them train."""

    token_ids: IntArray
    is_trained: BoolArray


def read_demonstrations(path: Path, renderer: Renderer) -> list[Demonstration]:
    """Every line of a JSONL file of `{"messages": [...], "tools": [...] or null}`.

    Raises: UserError that names the line which does not fit.
    """
    if not path.exists():
        raise UserError(f"{path} is missing: a warm-up needs demonstrations, one JSON object with 'messages' a line")
    with storage_errors(path, "reading"):
        lines = path.read_text(encoding="utf-8").splitlines()
    found: list[Demonstration] = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            found.append(encode_demonstration(renderer, entry["messages"], entry.get("tools")))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}:{number} is not a demonstration: {error!r}") from error
        except UserError as error:
            raise UserError(f"{path}:{number}: {error}") from error
    if not found:
        raise UserError(f"{path} holds no demonstrations")
    return found


def encode_demonstration(
    renderer: Renderer, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
) -> Demonstration:
    """Ids and mask of one chat.

    Raises: UserError when it has no answer, or when the template writes an earlier turn differently later on.
    """
    turns = _answers(messages)
    if not turns:
        raise UserError("a demonstration ends with at least one assistant message after the last user message")
    token_ids = renderer.render(messages[: turns[-1] + 1], tools, add_generation_prompt=False)
    is_trained = np.zeros(len(token_ids), bool)
    for turn in turns:
        prompt = renderer.render(messages[:turn], tools)
        answered = renderer.render(messages[: turn + 1], tools, add_generation_prompt=False)
        if answered[: len(prompt)] != prompt or token_ids[: len(answered)] != answered:
            raise UserError(f"the chat template rewrites message {turn} when it renders the rest; its mask is unknown")
        ends = [at for at in range(len(prompt), len(answered)) if answered[at] in renderer.stop_token_ids]
        if not ends:
            raise UserError(f"the chat template does not end message {turn} with a token that the model stops at")
        is_trained[len(prompt) : ends[-1] + 1] = True
    last = int(np.flatnonzero(is_trained)[-1])
    return Demonstration(np.array(token_ids[: last + 1], np.int32), is_trained[: last + 1])


def batch_of(demonstrations: Sequence[Demonstration], step: int) -> Batch:
    """A batch whose only loss component is `ce`, on the trained tokens."""
    is_trained = np.concatenate([d.is_trained for d in demonstrations])
    columns = filled(
        len(is_trained),
        {"token_ids": np.concatenate([d.token_ids for d in demonstrations]), "ce_weights": is_trained},
    )
    lengths = np.array([len(d.token_ids) for d in demonstrations], np.int32)
    return Batch(sequence_lengths=lengths, step=step, draw_ids=(), **columns)


def shuffled_batches(demonstrations: Sequence[Demonstration], size: int, seed: int) -> Iterator[list[Demonstration]]:
    """Batches for ever; each pass over the demonstrations has an order of its own."""
    for chosen in shuffled_places(len(demonstrations), size, seed):
        yield [demonstrations[index] for index in chosen]


def shuffled_places(number: int, size: int, seed: int) -> Iterator[list[int]]:
    """Which of `number` examples each batch takes, for ever; each pass over them has an order of its own."""
    rng = np.random.default_rng(seed)
    queue: list[int] = []
    while True:
        while len(queue) < size:
            queue += rng.permutation(number).tolist()
        yield queue[:size]
        queue = queue[size:]


def _answers(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    last_user = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=-1)
    return [at for at in range(last_user + 1, len(messages)) if messages[at]["role"] == "assistant"]
