"""Fields in XML-like tags: `<answer>42</answer>`.

Parts: `XMLParser`. A field may have alternatives: `("code", "answer")` reads either tag under both names, the first
being the canonical one. Invariant: a missing field is None, never an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from mettle.envs.parsers.parser import Extract, Parser, _unchanged, message_text
from mettle.records.spans import spans


class XMLParser(Parser):
    """Reads the given fields; `answer_field` is the one that holds the answer."""

    def __init__(
        self,
        fields: Sequence[str | tuple[str, ...]],
        answer_field: str = "answer",
        extract_fn: Extract = _unchanged,
    ) -> None:
        super().__init__(extract_fn)
        self.answer_field = answer_field
        self._fields = [_field_names(field) for field in fields]
        canonical = [names[0] for names in self._fields]
        repeated = sorted({name for name in canonical if canonical.count(name) > 1})
        if repeated:
            raise ValueError(f"field {repeated[0]!r} is given twice; each canonical field name may occur once")
        if "think" in canonical:
            self.logger.warning("the field 'think' is never there when the endpoint returns thinking separately")
        self._names = [name for names in self._fields for name in names]

    def parse(self, text: str, strip: bool = True, last: bool = False) -> SimpleNamespace:
        """One attribute per tag and alternative: the first (or `last`) match, None without one.

        Space at either end never belongs to a field, with or without `strip`, as in verifiers v0.
        """
        return SimpleNamespace(**{name: _inside(text, name, last=last) for name in self._names})

    def parse_answer(self, completion: Any) -> Any:
        """The answer field of the last assistant message that has it; of a text, its last occurrence."""
        if isinstance(completion, str):
            return self._extracted(self.parse(completion, last=True))
        for message in reversed(self.get_assistant_messages(completion)):
            answer = self._extracted(self.parse(message_text(message)))
            if answer is not None:
                return answer
        return None

    def get_fields(self) -> list[str]:
        """Canonical names, in order."""
        return [names[0] for names in self._fields]

    def get_format_str(self) -> str:
        """The format, as a model may be told it."""
        lines = []
        for names in self._fields:
            options = " | ".join(names)
            opening = f"[ {options} ]" if len(names) > 1 else options
            lines.append(f"<{opening}>\n...\n</{opening}>")
        return "\n".join(lines)

    def format(self, **values: Any) -> str:
        """Text in the format. Each field may be given under its canonical name or an alternative."""
        parts = []
        for names in self._fields:
            given = next((name for name in names if name in values), None)
            if given is None:
                raise ValueError(f"no value for the field {names[0]!r}; give one of {list(names)}")
            parts.append(f"<{names[0]}>\n{values[given]}\n</{names[0]}>")
        return "\n".join(parts)

    def get_format_reward_func(self) -> Callable[..., float]:
        """0.4 for fields present, 0.2 each for any field, a first and a last tag in place; mean over messages."""

        def format_reward_func(completion: Any, **_: Any) -> float:
            texts = [message_text(message) for message in self.get_assistant_messages(completion)]
            return sum(self._format_score(text) for text in texts) / len(texts) if texts else 0.0

        return format_reward_func

    def _extracted(self, parsed: SimpleNamespace) -> Any:
        answer = getattr(parsed, self.answer_field, None)
        return None if answer is None else self.extract_fn(answer)

    def _format_score(self, text: str) -> float:
        loose = self.parse(text)
        present = [any(getattr(loose, name) is not None for name in names) for names in self._fields]
        stripped = text.strip()
        starts = any(stripped.startswith(f"<{name}>") for name in self._fields[0])
        ends = any(stripped.endswith(f"</{name}>") for name in self._fields[-1])
        shared = sum(present) / len(present)
        return 0.2 + 0.4 * shared + 0.2 * starts + 0.2 * ends  # .2 for its spacing, which in verifiers any text has


def _inside(text: str, name: str, *, last: bool) -> str | None:
    found: str | None = None
    for span in spans(text, f"<{name}>", f"</{name}>"):
        found = span.inside
        if not last:
            break
    return found


def _field_names(field: Any) -> tuple[str, ...]:
    if isinstance(field, str):
        return (field,)
    if not isinstance(field, tuple):
        raise TypeError(f"a field is a str or a tuple of str, not {type(field).__name__}")
    if not field:
        raise ValueError("a tuple of field names may not be empty")
    if not all(isinstance(name, str) for name in field):
        raise TypeError(f"every name of a field is a str; got {field!r}")
    return field
