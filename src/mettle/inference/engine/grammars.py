"""Grammars that a choice must keep to: JSON schemas, regular expressions, lists of choices, Lark. No torch here.

llguidance compiles them and says after each token which ones may follow. A grammar comes from whoever sends a request,
so all that it can cost is bounded: its text, its compilation (in the sender's thread, before the engine hears of it),
and the work for one token of one choice (a few ms); what is beyond a bound fails its own request and nothing else.
Invariant: a choice that ended by itself fulfils its grammar; one that was cut at `max_tokens` is a beginning of one.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from mettle.extras import install_line
from mettle.inference.engine.protocol import RequestRefused
from mettle.records.sampling import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

MAX_TEXT = 64 << 10
_MAX_KEPT = 32
_JSON: Final[JsonCompileOptions] = {"whitespace_pattern": r"[ \n\t]{0,8}"}
"""Room to indent, and no more: a small model would go on with blanks until it is cut."""
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,  # about 20 ms
    "step_lexer_fuel": 40_000,  # about 3 ms
    "step_max_items": 12_000,
    "max_items_in_row": 1_000,
    "max_lexer_states": 20_000,  # of 1 to 2 kB
    "max_grammar_size": 100_000,
}


class TokenConstraint:
    """What may come next in one choice. `error` is set when a bound was reached, and then nothing else counts."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, field: str) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._field = field
        self.error: RequestRefused | None = None

    @property
    def is_done(self) -> bool:
        """True when nothing but an end token can follow."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens [V] may come next; all of them after an error."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._has_failed():
            return np.ones(self._vocab_size, np.bool_)
        return np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(np.bool_)

    def accept(self, token_id: int) -> None:
        """Go on with a token."""
        if self.error is None:
            self._matcher.consume_token(token_id)
            self._has_failed()

    def copy(self) -> TokenConstraint:
        """One that goes its own way from here."""
        return TokenConstraint(self._matcher.deep_copy(), self._vocab_size, self._field)

    def _has_failed(self) -> bool:
        if self._matcher.is_error():
            self.error = refused(self._matcher.get_error(), self._field)
        return self.error is not None


class Grammars:
    """The grammars of one tokenizer. Any thread may ask; the newest ones are kept compiled."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        self._file, self._vocab_size, self._ends = tokenizer_file, vocab_size, list(end_token_ids)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[Constraint, TokenConstraint] = OrderedDict()

    def begin(self, constraint: Constraint) -> TokenConstraint:
        """A new choice under a constraint.

        Raises: RequestRefused when it is not valid, too large, or nothing of this server's can fulfil it.
        """
        with self._lock:
            found = self._kept.get(constraint)
            if found is not None:
                self._kept.move_to_end(constraint)
                return found.copy()
        made = self._compiled(constraint)
        with self._lock:
            self._kept[constraint] = made
            while len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return made.copy()

    def _compiled(self, constraint: Constraint) -> TokenConstraint:
        if len(constraint.text) > MAX_TEXT:
            message = f"the grammar has {len(constraint.text):,} characters, and may have {MAX_TEXT:,}"
            raise RequestRefused(message, constraint.field)
        try:
            import llguidance
        except ImportError:
            line = install_line("grammar")
            message = f"this server lacks the package llguidance, which `{line}` brings"
            raise RequestRefused(message, constraint.field) from None
        limits = llguidance.LLParserLimits(**_LIMITS, verbose_errors=False)
        matcher = llguidance.LLMatcher(
            self._tokens(constraint.field), _grammar(llguidance.LLMatcher, constraint), log_level=0, limits=limits
        )
        made = TokenConstraint(matcher, self._vocab_size, constraint.field)
        if not made._has_failed():
            made.allowed()  # the first token's work is done here, and its bounds are reached here
        if made.error is not None:
            raise made.error
        return made

    def _tokens(self, field: str) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._lock:
            if self._tokenizer is None:
                try:
                    text = self._file.read_text(encoding="utf-8")
                    ends: Any = self._ends or None
                    self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=ends)
                except (OSError, ValueError) as error:
                    message = f"grammars cannot be kept to with this model's tokenizer: {error}"
                    raise RequestRefused(message, field) from error
            return self._tokenizer


def refused(error: str, field: str) -> RequestRefused:
    """What llguidance says, in one line."""
    return RequestRefused(f"the grammar is refused: {' '.join(error.split())[:300]}", field)


def _grammar(matcher: type[LLMatcher], constraint: Constraint) -> str:
    made: str
    text = constraint.text
    match constraint.kind:
        case "json_object":
            made = matcher.grammar_from_json_schema('{"type": "object"}', overrides=_JSON)
        case "json":
            made = matcher.grammar_from_json_schema(text, overrides=_JSON)
        case "regex":
            made = matcher.grammar_from_regex(text)
        case "choice":
            made = matcher.grammar_from_lark("start: " + " | ".join(map(_quoted, json.loads(text))))
        case _:
            made = matcher.grammar_from_lark(text)
    return made


def _quoted(choice: str) -> str:
    # Lark's strings are JSON's.
    return json.dumps(choice, ensure_ascii=False)
