"""Who is let in: requests in the order they came, as far as there are slots and bytes for them.

A request comes in whole if there are slots for all of its choices; where the bytes don't last for all of them, the
first are started and the rest comes back as what it is, choices without a token. What lost its keys and values to an
older sequence (`take_back`) comes before anything new, but not before a running sequence has ended and made room: else
the two would take from each other for ever. Invariant: nobody overtakes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from mettle.inference.engine.limits import Limits
from mettle.inference.engine.memory import KvMemory
from mettle.inference.engine.prefixes import PAGE, Unit
from mettle.inference.engine.prompts import AdmittedPrompt, batches_of
from mettle.inference.engine.protocol import GenerationRequest
from mettle.inference.engine.sequences import RunningRequest, RunningSequence


@dataclass(slots=True)
class QueuedRequest:
    """A request, or the choices of it that are to be started or started again."""

    owner: RunningRequest
    sequences: list[RunningSequence]

    @property
    def prompt(self) -> tuple[int, ...]:
        """The prompt's tokens."""
        return tuple(self.owner.request.prompt_ids)


class EngineAdmission:
    """The queue. `waiting` has not begun, `back` has."""

    def __init__(self, limits: Limits, memory: KvMemory) -> None:
        self.waiting: deque[QueuedRequest] = deque()
        self.back: deque[QueuedRequest] = deque()
        self.has_room = True  # something ended since the last time that something was taken back
        self._limits = limits
        self._memory = memory

    @property
    def num_waiting(self) -> int:
        """Choices that wait."""
        return sum(len(entry.sequences) or entry.owner.request.n for entry in (*self.back, *self.waiting))

    def take_back(self, entry: QueuedRequest) -> None:
        """Queue sequences whose keys and values were given up: the youngest first, so that the oldest is before."""
        for sequence in entry.sequences:
            sequence.replay()
        self.has_room = False
        self.back.appendleft(entry)

    def forget(self, owner: RunningRequest) -> None:
        """Drop a request that was aborted or has failed."""
        for queue in (self.waiting, self.back):
            for entry in [entry for entry in queue if entry.owner is owner]:
                queue.remove(entry)

    def clear(self) -> None:
        """Forget everything."""
        self.waiting.clear()
        self.back.clear()

    def admit(
        self, base_version: int, num_slots: int, num_pending: int, *, is_new_wanted: bool
    ) -> list[list[AdmittedPrompt]]:
        """What begins now, when `num_slots` slots are taken and `num_pending` tokens of prompts are under way."""
        found: dict[tuple[int | None, Unit, tuple[int, ...]], AdmittedPrompt] = {}
        while (queue := self._next_queue(is_new_wanted)) is not None:
            entry = queue[0]
            unit = entry.owner.unit(base_version)
            key = (_num_skippable(entry.owner.request), unit, entry.prompt)
            prompt = found.get(key) or self._admitted(entry, unit)
            num_new = 0 if key in found else len(entry.prompt) - prompt.start
            num_slots += len(entry.sequences)
            is_too_much = num_pending > 0 and num_pending + num_new > self._limits.max_prefill_tokens
            if num_slots > self._limits.max_slots or (num_new and is_too_much):
                break
            taken = self._promise(entry, prompt, is_known=key in found)
            if taken is None:
                break
            num_pending += num_new
            found[key] = prompt
            prompt.owners.append(entry.owner)
            prompt.sequences += taken
            queue.popleft()
            if len(taken) < len(entry.sequences):
                self.back.appendleft(QueuedRequest(entry.owner, entry.sequences[len(taken) :]))
                self.has_room = False
                break
        return batches_of(list(found.values()))

    def _next_queue(self, is_new_wanted: bool) -> deque[QueuedRequest] | None:
        if self.back:
            return self.back if self.has_room else None
        return self.waiting if self.waiting and is_new_wanted else None

    def _admitted(self, entry: QueuedRequest, unit: Unit) -> AdmittedPrompt:
        pages = self._memory.prefixes.match(unit, entry.prompt)[: _num_skippable(entry.owner.request)]
        return AdmittedPrompt(entry.prompt, unit, pages)

    def _promise(self, entry: QueuedRequest, prompt: AdmittedPrompt, *, is_known: bool) -> list[RunningSequence] | None:
        # The choices that there are bytes for, which are set aside; None when there are not enough for one.
        memory = self._memory
        needed = 0 if is_known else memory.prompt_bytes(len(prompt.token_ids))
        slots = [memory.slot_bytes(sequence.num_tokens + 1) for sequence in entry.sequences]
        count = len(slots)
        while not memory.claim(needed + sum(slots[:count])):
            count -= 1
            if count < 1:
                return None
        num_bytes = needed + sum(slots[:count])
        memory.promised += num_bytes
        prompt.promised += num_bytes
        return entry.sequences[:count]


def _num_skippable(request: GenerationRequest) -> int | None:
    """The pages of a known prefix that need not be computed again; None: all of them.

    A prompt whose log-probabilities are wanted is computed from its first token on, and one of which a part is drawn
    again from the token before that part.
    """
    if request.prompt_logprobs:
        return 0
    return None if request.redraw is None else (request.redraw.start - 1) // PAGE
