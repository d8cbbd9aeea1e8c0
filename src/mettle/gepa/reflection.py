"""The model that rewrites prompts, asked through our own clients.

Parts: `ReflectionModel`. Invariants: an answer is in the journal before the search acts on it, so that a resumed run
goes on with the same words; an answer that was cut off, or is empty, is a failure and never a candidate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mettle.clients.base import Client
from mettle.errors import ProviderError
from mettle.gepa.guard import Guard
from mettle.gepa.journal import PromptJournal
from mettle.gepa.rollouts import SearchLoop
from mettle.records.messages import content_text, messages_from


class ReflectionModel:
    """Callable as the library wants it: a prompt in, the model's text out."""

    def __init__(
        self,
        loop: SearchLoop,
        client: Client,
        model: str,
        journal: PromptJournal,
        guard: Guard,
        sampling_args: Mapping[str, Any] | None = None,
    ) -> None:
        self._loop, self._client, self._model = loop, client, model
        self._journal, self._guard = journal, guard
        self._sampling_args = dict(sampling_args or {})
        self.total_cost = 0.0  # What the library would limit; our limit is the number of rollouts.
        self.num_calls = 0

    def __call__(self, prompt: str | list[dict[str, Any]]) -> str:
        """The model's answer.

        Raises: ProviderError when there is none that can be used.
        """
        text = prompt if isinstance(prompt, str) else content_text(prompt[-1]["content"])
        found = self._journal.take_text(text)
        if found is None:
            with self._guard.watching("the reflection model"):
                found = self._loop.run(self._ask(text))
            self._journal.add_text(text, found)
        self.num_calls += 1
        return found

    async def _ask(self, text: str) -> str:
        messages = messages_from([{"role": "user", "content": text}])
        response = await self._client.get_response(
            prompt=messages, model=self._model, sampling_args=self._sampling_args, tools=None
        )
        message = response["message"]
        answer = content_text(message.get("content")) or ""
        if message.get("is_truncated"):
            raise ProviderError(f"{self._model} was cut off after {len(answer)} characters of a new prompt")
        if not answer.strip():
            raise ProviderError(f"{self._model} answered a reflection prompt with nothing")
        return answer
