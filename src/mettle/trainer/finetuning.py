"""Supervised fine-tuning on a file, alone: chats, or prompts with completions, in; a model or an adapter out.

Parts: `read_examples`, `fine_tune`; the loop is that of `epochs`. A chat's mask comes from its template, as in the
warm-up (`demonstrations`); where there is no template a prompt and its completion are encoded apart, so that which
tokens train is known from where they came from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mettle.clients.renderer import Renderer
from mettle.errors import UserError
from mettle.storage.files import storage_errors
from mettle.trainer.demonstrations import Demonstration, batch_of, encode_demonstration
from mettle.trainer.epochs import Figures, Tell, TunedStep, Tuning, check_place, tune_in_epochs
from mettle.trainer.learner import Learner

Row = TypeVar("Row")


def fine_tune(task: Tuning, tell: Tell) -> dict[str, Any]:
    """Train and write `task.to`; `tell` hears of each step. Returns the losses of the first and the last step.

    Raises: UserError when a line, the model or the adapters do not fit.
    """
    check_place(task)
    examples = read_examples(task.data, Renderer.from_directory(task.model))

    def begin(learner: Learner, _: Path) -> TunedStep:
        def take(places: Sequence[int], step: int) -> Figures:
            return learner.train(batch_of([examples[place] for place in places], step), step)

        return take

    done = tune_in_epochs(task, len(examples), begin, tell, kept=("loss/ce",))
    losses = {f"{end}_loss": done.pop(end)["loss/ce"] for end in ("first", "last") if end in done}
    return {"examples": len(examples), **done, **losses}


def read_examples(path: Path, renderer: Renderer) -> list[Demonstration]:
    """Every line of a JSONL file: `{"messages": [...]}`, or `{"prompt": ..., "completion": ...}` as texts or messages.

    Raises: UserError that names the line which does not fit.
    """
    return read_rows(path, lambda row: example_of(row, renderer), "example")


def read_rows(path: Path, make: Callable[[dict[str, Any]], Row], noun: str) -> list[Row]:
    """What `make` makes of every line of a JSONL file.

    Raises: UserError that names the line which does not fit, or says that there is none.
    """
    with storage_errors(path, "reading"):
        lines = path.read_text(encoding="utf-8").splitlines()
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append(make(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}:{number} is no {noun}: {error!r}") from error
        except UserError as error:
            raise UserError(f"{path}:{number}: {error}") from error
    if not found:
        raise UserError(f"{path} holds no {noun}s")
    return found


def example_of(row: dict[str, Any], renderer: Renderer) -> Demonstration:
    """A row\'s tokens, and which of them train. Raises: UserError for one that is no example."""
    if "messages" in row:
        return encode_demonstration(renderer, row["messages"], row.get("tools"))
    if not {"prompt", "completion"} <= row.keys():
        raise UserError(
            f"an example has 'messages', or 'prompt' and 'completion'; this one has {', '.join(row) or 'nothing'}"
        )
    prompt, completion = row["prompt"], row["completion"]
    if renderer.has_chat_template or not (isinstance(prompt, str) and isinstance(completion, str)):
        return encode_demonstration(renderer, [*_messages(prompt, "user"), *_messages(completion, "assistant")])
    before = renderer.encode(prompt, add_special_tokens=True)
    after = [*renderer.encode(completion), *list(renderer.stop_token_ids)[:1]]
    is_trained = np.arange(len(before) + len(after)) >= len(before)
    return Demonstration(np.array([*before, *after], np.int32), is_trained)


def _messages(said: Any, role: str) -> Sequence[Any]:
    return [{"role": role, "content": said}] if isinstance(said, str) else list(said)
