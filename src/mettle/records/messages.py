"""Messages of a conversation, and what a model answers: dicts whose keys are also attributes.

Parts: the message classes by role, `ToolCall`, `Tool`, `Usage`, `ResponseTokens` (the sampled ids
of one model call), `ResponseMessage`, `Response`; `message_from` and `messages_from` read what others wrote.
Invariant: every message is a plain dict to anybody who wants one (`json.dumps`, `isinstance(message, dict)`, equality),
and a field that a class knows but a message does not carry reads as None. `ResponseTokens` stores only the ids that its
call added; the whole prompt is put together when somebody asks.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from mettle.records.record import Record

Content = str | list[dict[str, Any]] | None


class Message(Record):
    """One message. Classes by role set `role`; content is text or a list of parts."""

    __slots__ = ()
    FIELDS = frozenset({"content"})
    ROLE: ClassVar[str] = ""

    def __init__(self, raw: Mapping[str, Any] | None = None, /, **fields: Any) -> None:
        super().__init__(role=self.ROLE)
        if raw is not None:
            self.update(raw)
        if fields:
            self.update(fields)

    @property
    def text(self) -> str:
        """The content as text; text parts are joined by a space, other parts left out."""
        return content_text(self.get("content"))


class SystemMessage(Message):
    """What the model is told before the conversation."""

    __slots__ = ()
    ROLE = "system"

    @classmethod
    def from_path(cls, path: str | Path) -> Self:
        """The text of a file, as it stands."""
        return cls(content=Path(path).read_text(encoding="utf-8"))


class UserMessage(Message):
    """What the environment or a person says."""

    __slots__ = ()
    ROLE = "user"


class TextMessage(Message):
    """Bare text, for a completion endpoint that knows no roles."""

    __slots__ = ()
    ROLE = "text"


class ToolMessage(Message):
    """What a tool answered to the call `tool_call_id`."""

    __slots__ = ()
    ROLE = "tool"
    FIELDS = frozenset({"content", "tool_call_id", "name"})


class AssistantMessage(Message):
    """What the model says, thinks (`reasoning_content`) and calls (`tool_calls`)."""

    __slots__ = ()
    ROLE = "assistant"
    FIELDS = frozenset({"content", "reasoning_content", "thinking_blocks", "tool_calls"})

    def __init__(self, raw: Mapping[str, Any] | None = None, /, **fields: Any) -> None:
        super().__init__(raw, **fields)
        if self.get("tool_calls"):
            self["tool_calls"] = [tool_call_from(call) for call in self["tool_calls"]]


class _FunctionView(Record):
    """`call.function`, for code written against the nested form."""

    __slots__ = ()


class ToolCall(Record):
    """A call of a tool: `id`, `name`, and `arguments` as JSON text. `.function.name` works too."""

    __slots__ = ()
    FIELDS = frozenset({"id", "name", "arguments"})

    def __missing__(self, name: str) -> Any:
        if name == "function":
            return _FunctionView(name=self["name"], arguments=self["arguments"])
        if name == "type":
            return "function"
        return super().__missing__(name)

    def get(self, key: str, default: Any = None) -> Any:
        """Like `dict.get`, for the nested form too."""
        return self[key] if key in ("function", "type") else super().get(key, default)

    def __contains__(self, key: object) -> bool:
        return key in ("function", "type") or super().__contains__(key)


class Tool(Record):
    """A tool that the model may call; `parameters` is a JSON schema."""

    __slots__ = ()
    FIELDS = frozenset({"name", "description", "parameters", "strict"})


class Usage(Record):
    """Tokens that a provider counted for one model call."""

    __slots__ = ()
    FIELDS = frozenset({"prompt_tokens", "completion_tokens", "reasoning_tokens", "cached_tokens", "total_tokens"})


class ResponseTokens(Mapping[str, Any]):
    """The exact ids of one model call, as a mapping that stores only what the call added.

    The prompt is the first `prefix_length` ids of what `previous` ends with (its prompt and completion) followed by
    `new_prompt_ids`. Logprobs are natural logarithms; `completion_versions` is the policy version that sampled each id
    (empty when the endpoint does not tell), `replica` the engine that did, where there are several. Keys are those of
    verifiers' `ResponseTokens`; `prompt_ids` and the masks are made on access. A `completion_mask` with zeros marks ids
    in the completion that the policy did not sample.
    """

    __slots__ = (
        "_completion_experts",
        "_completion_ids",
        "_completion_logprobs",
        "_completion_mask",
        "_completion_versions",
        "_new_prompt_ids",
        "_num_prompt",
        "overlong_prompt",
        "prefix_length",
        "previous",
        "replica",
        "was_cut",
    )
    KEYS: ClassVar[tuple[str, ...]] = (
        "prompt_ids",
        "prompt_mask",
        "completion_ids",
        "completion_mask",
        "completion_logprobs",
        "completion_versions",
        "completion_experts",
        "replica",
        "overlong_prompt",
        "is_truncated",
    )

    def __init__(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        completion_logprobs: Sequence[float] = (),
        completion_versions: Sequence[int] = (),
        *,
        previous: ResponseTokens | None = None,
        completion_mask: Sequence[int] | None = None,
        completion_experts: Sequence[int] = (),
        replica: str = "",
        **_: Any,
    ) -> None:
        self.previous: ResponseTokens | None = None
        self.prefix_length = 0
        self._num_prompt = len(prompt_ids)
        self._new_prompt_ids = array("i", prompt_ids)
        self._completion_ids = array("i", completion_ids)
        self._completion_logprobs = array("d", completion_logprobs)
        self._completion_versions = array("i", completion_versions)
        self._completion_experts = array("h", completion_experts)
        has_zeros = completion_mask is not None and not all(completion_mask)
        self._completion_mask = array("i", completion_mask) if completion_mask is not None and has_zeros else None
        self.replica = replica
        self.overlong_prompt = False
        self.was_cut = False
        if previous is not None:
            self.follow(previous)

    def follow(self, previous: ResponseTokens) -> None:
        """Share the common prefix with `previous` from here on; what is read stays the same."""
        prompt, whole = self._prompt(), previous._whole()
        shared = _common_prefix(prompt, whole)
        self.previous, self.prefix_length = (previous, shared) if shared else (None, 0)
        self._new_prompt_ids = prompt[shared:]

    def parts(self) -> dict[str, Any]:
        """What is stored, as `from_parts` takes it: numbers as they are, without the previous call."""
        return {
            "num_prompt": self._num_prompt,
            "prefix_length": self.prefix_length,
            "new_prompt_ids": self._new_prompt_ids,
            "completion_ids": self._completion_ids,
            "completion_logprobs": self._completion_logprobs,
            "completion_versions": self._completion_versions,
            "completion_mask": self._completion_mask or array("i"),
            "completion_experts": self._completion_experts,
            "replica": self.replica,
            "overlong_prompt": self.overlong_prompt,
            "was_cut": self.was_cut,
        }

    @classmethod
    def from_parts(
        cls,
        *,
        num_prompt: int,
        prefix_length: int,
        new_prompt_ids: array[int],
        completion_ids: array[int],
        completion_logprobs: array[float],
        completion_versions: array[int],
        completion_mask: array[int],
        completion_experts: array[int],
        overlong_prompt: bool,
        was_cut: bool,
        replica: str = "",
        previous: ResponseTokens | None = None,
    ) -> ResponseTokens:
        """Tokens from what is stored of them; `previous` is the call whose prefix they share."""
        if prefix_length + len(new_prompt_ids) != num_prompt or (prefix_length and previous is None):
            raise ValueError(f"{prefix_length} shared and {len(new_prompt_ids)} new ids are no prompt of {num_prompt}")
        mask = completion_mask or None
        tokens = cls(
            new_prompt_ids, completion_ids, completion_logprobs, completion_versions,
            completion_mask=mask, completion_experts=completion_experts, replica=replica,
        )  # fmt: skip
        tokens._num_prompt = num_prompt
        tokens.previous, tokens.prefix_length = previous, prefix_length
        tokens.overlong_prompt, tokens.was_cut = overlong_prompt, was_cut
        return tokens

    def whole_prompt(self) -> array[int]:
        """The whole prompt, compactly."""
        return self._prompt()

    def cut(self, max_length: int) -> None:
        """Keep at most `max_length` ids; a prompt that is longer by itself loses its whole completion."""
        room = max(0, max_length - self._num_prompt)
        if room >= len(self._completion_ids):
            return
        self.was_cut = True
        del self._completion_experts[room * self._num_experts :]
        self.overlong_prompt = self._num_prompt > max_length
        del self._completion_ids[room:]
        del self._completion_logprobs[room:]
        del self._completion_versions[room:]
        if self._completion_mask is not None:
            del self._completion_mask[room:]

    @property
    def new_prompt_ids(self) -> array[int]:
        """The prompt ids that this call added to the shared prefix."""
        return self._new_prompt_ids

    @property
    def num_prompt_ids(self) -> int:
        """Length of the whole prompt."""
        return self._num_prompt

    @property
    def completion_ids(self) -> list[int]:
        """The sampled ids, the stop token included."""
        return self._completion_ids.tolist()

    @property
    def completion_logprobs(self) -> list[float]:
        """Log probability of each sampled id."""
        return self._completion_logprobs.tolist()

    @property
    def completion_versions(self) -> list[int]:
        """Policy version that sampled each id."""
        return self._completion_versions.tolist()

    @property
    def completion_experts(self) -> array[int]:
        """The experts that a mixture's engine chose for each sampled id, one id after the other; empty where it did not
        tell."""
        return self._completion_experts

    @property
    def _num_experts(self) -> int:
        # Of an id, over all layers.
        return len(self._completion_experts) // max(1, len(self._completion_ids))

    @property
    def prompt_ids(self) -> list[int]:
        """The whole prompt."""
        return self._prompt().tolist()

    @property
    def prompt_mask(self) -> list[int]:
        """Zeros, one for each prompt id."""
        return [0] * self._num_prompt

    @property
    def completion_mask(self) -> list[int]:
        """One for each sampled id, zero for an id that came from elsewhere."""
        return [1] * len(self._completion_ids) if self._completion_mask is None else self._completion_mask.tolist()

    @property
    def is_all_sampled(self) -> bool:
        """True when the policy sampled every id of the completion."""
        return self._completion_mask is None

    @property
    def is_truncated(self) -> bool:
        """True when ids were cut away to keep within the sequence limit."""
        return self.was_cut

    def context_ids(self) -> list[int]:
        """Prompt and completion: what a later turn extends."""
        return self._whole().tolist()

    def _prompt(self) -> array[int]:
        if self.previous is None:
            return self._new_prompt_ids
        pieces: list[array[int]] = []
        turn, length = self, self._num_prompt
        while turn.previous is not None:
            if length > turn.prefix_length:
                pieces.append(turn._new_prompt_ids[: length - turn.prefix_length])
                length = turn.prefix_length
            turn = turn.previous
            if length > turn._num_prompt:
                pieces.append(turn._completion_ids[: length - turn._num_prompt])
                length = turn._num_prompt
        ids = turn._new_prompt_ids[:length]
        for piece in reversed(pieces):
            ids.extend(piece)
        return ids

    def _whole(self) -> array[int]:
        return self._prompt() + self._completion_ids

    def __getitem__(self, key: str) -> Any:
        if key in self.KEYS:
            return getattr(self, key)
        if key == "routed_experts":
            return None
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.KEYS)

    def __len__(self) -> int:
        return len(self.KEYS)

    def __repr__(self) -> str:
        return f"ResponseTokens({self._num_prompt} prompt ids, {len(self._completion_ids)} completion ids)"

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """Everything, materialised."""
        return dict(self)


class ResponseMessage(Message):
    """The message inside a response, with how it ended."""

    __slots__ = ()
    ROLE = "assistant"
    FIELDS = AssistantMessage.FIELDS | {"finish_reason", "is_truncated", "tokens"}

    def to_assistant(self) -> AssistantMessage:
        """What becomes part of the conversation: fields that say something, and no bookkeeping."""
        message = AssistantMessage(content=self.get("content"))
        for key in ("reasoning_content", "thinking_blocks", "tool_calls"):
            if self.get(key):
                message[key] = self[key]
        return message


class Response(Record):
    """What a client gives back for one model call."""

    __slots__ = ()
    FIELDS = frozenset({"id", "created", "model", "usage", "message"})

    def __missing__(self, name: str) -> Any:
        if name == "choices":
            return [_ChoiceView(index=0, message=self["message"], finish_reason=self["message"].finish_reason)]
        return super().__missing__(name)


class _ChoiceView(Record):
    """`response.choices[0]`, for code written against chat completions."""

    __slots__ = ()
    FIELDS = frozenset({"logprobs"})

    def __missing__(self, name: str) -> Any:
        if name == "text":
            return self["message"].text
        return super().__missing__(name)


Messages = list[Message]

MESSAGE_CLASSES: dict[str, type[Message]] = {
    "system": SystemMessage,
    "developer": SystemMessage,
    "user": UserMessage,
    "assistant": AssistantMessage,
    "tool": ToolMessage,
    "text": TextMessage,
}


def content_text(content: Any) -> str:
    """Content as text; the text parts of a list are joined by a space."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, Mapping))
        return " ".join(part for part in parts if isinstance(part, str))
    return str(content)


def tool_call_from(raw: Any) -> ToolCall:
    """A flat `ToolCall` from a flat or nested mapping, JSON text of one, or an object of another library."""
    if type(raw) is ToolCall:
        return raw
    if isinstance(raw, str):
        raw = json.loads(raw)
    if not isinstance(raw, Mapping):
        raw = raw.model_dump()
    source = raw.get("function") if isinstance(raw.get("function"), Mapping) else raw
    arguments = source.get("arguments")
    if arguments is not None and not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    return ToolCall(id=raw.get("id") or "", name=source.get("name"), arguments=arguments or "{}")


def tool_from(raw: Any) -> Tool:
    """A flat `Tool` from a flat mapping, one nested as chat completions has it, or an object of another library."""
    if not isinstance(raw, Mapping):
        raw = raw.model_dump()
    return Tool(**raw.get("function", raw))


def message_from(raw: Any) -> Message:
    """The message class of the role for any dict or object that describes a message."""
    if isinstance(raw, Message):
        return raw.to_assistant() if isinstance(raw, ResponseMessage) else raw
    if isinstance(raw, str):
        return TextMessage(content=raw)
    if not isinstance(raw, Mapping):
        if not hasattr(raw, "model_dump"):
            raise TypeError(f"a message is a dict with `role` and `content`, not {type(raw).__name__}")
        raw = raw.model_dump(exclude_none=True)
    role = raw.get("role")
    if role not in MESSAGE_CLASSES:
        raise TypeError(f"unknown message role {role!r}; known are {sorted(MESSAGE_CLASSES)}")
    return MESSAGE_CLASSES[role](raw)


def messages_from(raw: Any) -> Messages:
    """A conversation from text (one text message), one message, or a list of messages."""
    if raw is None:
        return []
    if isinstance(raw, str | Mapping):
        return [message_from(raw)]
    return [message if type(message) in _PLAIN_CLASSES else message_from(message) for message in raw]


_PLAIN_CLASSES = frozenset({SystemMessage, UserMessage, AssistantMessage, ToolMessage, TextMessage})


def _common_prefix(first: array[int], second: array[int]) -> int:
    limit = min(len(first), len(second))
    if first[:limit] == second[:limit]:
        return limit
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low
