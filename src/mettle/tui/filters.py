"""Which rollouts to show: `reward<0.5 error stop:max_turns task:12 text:"foo" !truncated`.

Parts: `Filter`, `parse_filter`. All terms must hold; `!` or `-` before one turns it round. A figure is compared
(`reward<0.5`, `tokens>=2000`, `time>10`, a metric by its name), a word is asked for (`error`, `ok`, `passed`, `failed`,
`truncated`), a name holds a text (`stop:max`, `error:timeout`, `task:12`). Invariant: everything but `text:` is decided
by the figures alone; a term that is not understood is refused with what there is.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mettle.errors import UserError
from mettle.evals.facts import RolloutFacts
from mettle.evals.passing import PassRule

Predicate = Callable[[RolloutFacts], bool]

FIGURES: dict[str, Callable[[RolloutFacts], float | None]] = {
    "reward": lambda facts: facts.reward,
    "tokens": lambda facts: facts.output_tokens,
    "input": lambda facts: facts.input_tokens,
    "time": lambda facts: facts.total_s,
    "model_time": lambda facts: facts.model_s,
    "env_time": lambda facts: facts.env_s,
    "turns": lambda facts: float(facts.num_turns),
    "task": lambda facts: float(facts.example_id) if isinstance(facts.example_id, int | float) else None,
}
WORDS = ("error", "ok", "passed", "failed", "truncated")
NAMES = ("text", "error", "stop", "task")
OPERATORS = {
    "<=": operator.le, ">=": operator.ge, "!=": operator.ne, "==": operator.eq,
    "<": operator.lt, ">": operator.gt, "=": operator.eq,
}  # fmt: skip
_TERM = re.compile(
    r"""\s*([!-]?)([^\s"':<>=!]*)(?:(:|\s*(?:<=|>=|!=|==|<|>|=))\s*)?("(?:[^"\\]|\\.)*"|'[^']*'|[^\s"']*)"""
)


@dataclass(frozen=True, slots=True)
class TextTerm:
    """A text that a conversation has to hold, or not."""

    text: str
    is_absent: bool = False


@dataclass(frozen=True, slots=True)
class Filter:
    """What was asked for: predicates over figures, and texts that only a look at the conversation decides."""

    source: str = ""
    predicates: tuple[Predicate, ...] = ()
    texts: tuple[TextTerm, ...] = ()

    def accepts(self, facts: RolloutFacts) -> bool:
        """Whether the figures of a rollout are as they were asked for."""
        return all(predicate(facts) for predicate in self.predicates)


def parse_filter(source: str, metrics: Iterable[str] = (), rule: PassRule | None = None) -> Filter:
    """Read a filter.

    Raises: UserError when a term is not understood.
    """
    predicates: list[Predicate] = []
    texts: list[TextTerm] = []
    known = list(metrics)
    at = 0
    while source[at:].strip():
        found = _TERM.match(source, at)
        if found is None or found.end() == at:
            raise UserError(f"cannot read {source[at:].strip()!r}; close the quotation mark")
        at = found.end()
        sign, name, sign_of, value = found.groups()
        if sign_of == ":" and name == "text":
            texts.append(TextTerm(_unquoted(value), bool(sign)))
            continue
        if not name and value.startswith(("'", '"')):
            texts.append(TextTerm(_unquoted(value), bool(sign)))
            continue
        predicate = _predicate(name, sign_of, _unquoted(value), known, rule or PassRule())
        predicates.append(_negated(predicate) if sign else predicate)
    if any(not term.text for term in texts):
        raise UserError('text: needs something to look for, as in text:"so the answer is"')
    return Filter(source.strip(), tuple(predicates), tuple(texts))


def _predicate(name: str, sign: str | None, value: str, metrics: list[str], rule: PassRule) -> Predicate:
    if sign is None:
        return _word(name + value, metrics, rule)
    if sign == ":":
        return _name(name, value)
    read = FIGURES.get(name)
    if read is None and name in metrics:
        read = lambda facts: facts.metrics.get(name)  # noqa: E731
    if read is None:
        raise UserError(_unknown("figure", name, [*FIGURES, *metrics]))
    try:
        number = float(value)
    except ValueError as error:
        raise UserError(f"{name} is compared with a number, not with {value!r}") from error
    compare = OPERATORS[sign.strip()]
    return lambda facts: (here := read(facts)) is not None and bool(compare(here, number))


def _word(word: str, metrics: list[str], rule: PassRule) -> Predicate:
    match word:
        case "error":
            return lambda facts: facts.cause is not None
        case "ok":
            return lambda facts: facts.cause is None
        case "passed":
            return rule.holds
        case "failed":
            return lambda facts: facts.reward is not None and not rule.holds(facts)
        case "truncated":
            return lambda facts: facts.is_truncated
    raise UserError(_unknown("word", word, [*WORDS, *FIGURES, *NAMES, *metrics]))


def _name(name: str, value: str) -> Predicate:
    wanted = value.casefold()
    match name:
        case "stop":
            return lambda facts: wanted in str(facts.stop_condition).casefold()
        case "error":
            return lambda facts: (
                facts.cause is not None
                and wanted in f"{facts.cause} {facts.error_type} {facts.error_message}".casefold()
            )
        case "task":
            return lambda facts: str(facts.example_id).casefold() == wanted
    raise UserError(_unknown("name", name, list(NAMES)))


def _negated(predicate: Predicate) -> Predicate:
    return lambda facts: not predicate(facts)


def _unquoted(value: str) -> str:
    if value[:1] == '"':
        return re.sub(r"\\(.)", r"\1", value[1:-1])
    return value[1:-1] if value[:1] == "'" else value


def _unknown(kind: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(dict.fromkeys(known))}"
    looked = f'; to look for it: text:"{name}"' if kind == "word" and not near else ""
    return f"no {kind} {name!r}; {hint}{looked}"
