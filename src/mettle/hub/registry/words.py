"""Words of environments, found: in names, descriptions and tags, READMEs, and the tasks that a check has seen.

Parts: `words_of` (a text as both databases index it), `parse` (what somebody asks for), `found` (the environments that
have it, with how far down the list each belongs), `keep_words` and `keep_tasks` (what is indexed of one).

What is asked for is words, and phrases in quotation marks; all must be there, a word also as the beginning of a longer
one. Text and question are cut into words here, in Python, so that SQLite (FTS5) and PostgreSQL (tsvector) agree on what
a word is, and nothing that somebody types is ever read as an operator. Invariant: an environment and its words change
in one transaction; the databases' own indices follow by trigger and by generated column (migration 0007).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, Float, Integer, Subquery, insert, select, text, update

from mettle.hub import tables

MAX_TERMS: Final = 8
MAX_WORD: Final = 64
MAX_PART_WORDS: Final = 6000
"""Of one README, or of the tasks of one environment. PostgreSQL counts places in a text up to 16,383."""
END: Final = "\N{LATIN LETTER LATERAL CLICK}"
"""Stands after each part, so that no phrase reaches from one part into the next; nobody can ask for it."""
PARTS: Final = ("name", "said", "readme", "tasks")
WEIGHTS: Final = {"name": 100.0, "said": 20.0, "readme": 2.0, "tasks": 1.0}
"""So far apart that a word in a name outweighs any number of them in a text, however long both are."""
_WORD: Final = re.compile(r"[^\W_]+")
_CHUNK: Final = re.compile(r'"([^"]*)"?|([^\s"]+)')


@dataclass(frozen=True, slots=True)
class Term:
    """Words that stand beside each other. `is_open`: the last one may go on."""

    words: tuple[str, ...]
    is_open: bool


def words_of(said: str, most: int = MAX_PART_WORDS) -> list[str]:
    """The words of a text: letters and digits, without case, accents and what else joins or parts them."""
    plain = said
    for _ in range(2):  # what is taken apart may have a case of its own
        plain = unicodedata.normalize("NFKD", plain).casefold()
    plain = "".join(each for each in plain if not unicodedata.category(each).startswith("M")).replace(END, " ")
    found: list[str] = []
    for match in _WORD.finditer(plain):
        if len(found) == most:
            break
        found.append(match.group()[:MAX_WORD])
    return found


def parse(asked: str) -> list[Term]:
    """What is asked for; nothing where no character is a letter or a digit."""
    terms = []
    for match in _CHUNK.finditer(asked[:1000]):
        words = words_of(match[1] or match[2] or "", MAX_TERMS)
        if words:
            terms.append(Term(tuple(words), is_open=match[2] is not None))
    return terms[:MAX_TERMS]


def found(c: Connection, asked: str) -> Subquery | None:
    """(environment_id, far) of the environments that have it, the best with the least; None where no word is asked."""
    terms = parse(asked)
    if not terms:
        return None
    if c.dialect.name == "sqlite":
        weights = ", ".join(str(WEIGHTS[part]) for part in PARTS)
        query = text(
            f"SELECT rowid AS text_id, bm25({tables.SEARCH}, {weights}) AS far FROM {tables.SEARCH}"
            f" WHERE {tables.SEARCH} MATCH :asked"
        ).bindparams(asked=_fts5(terms))
    else:
        most = max(WEIGHTS.values())
        weights = ", ".join(str(WEIGHTS[part] / most) for part in reversed(PARTS))  # D, C, B, A
        query = text(
            f"SELECT id AS text_id, -ts_rank('{{{weights}}}', {tables.SEARCH}, asked.q) AS far"
            f" FROM environment_texts, to_tsquery('simple', :asked) AS asked(q) WHERE {tables.SEARCH} @@ asked.q"
        ).bindparams(asked=_tsquery(terms))
    hits = query.columns(text_id=Integer, far=Float).subquery("hits")
    t = tables.environment_texts.c
    joined = tables.environment_texts.join(hits, hits.c.text_id == t.id)
    return select(t.environment_id, hits.c.far).select_from(joined).subquery("found")


def keep_words(c: Connection, environment_id: str, *, name: str, said: str, readme: str) -> None:
    """What is indexed of an environment from now on; the tasks that were seen stay until they are seen anew."""
    values = {"name": _part([name]), "said": _part([said]), "readme": _part([readme])}
    t = tables.environment_texts.c
    if not c.execute(
        update(tables.environment_texts).where(t.environment_id == environment_id).values(**values)
    ).rowcount:
        c.execute(insert(tables.environment_texts).values(environment_id=environment_id, tasks="", **values))


def keep_tasks(c: Connection, environment_id: str, tasks: Iterable[str]) -> None:
    """Index what its tasks ask. It is text that nobody vouches for, and only ever words."""
    t = tables.environment_texts.c
    c.execute(update(tables.environment_texts).where(t.environment_id == environment_id).values(tasks=_part(tasks)))


def _part(texts: Iterable[str]) -> str:
    words: list[str] = []
    for each in texts:
        if len(words) >= MAX_PART_WORDS:
            break
        words += [*words_of(each, MAX_PART_WORDS - len(words)), END]
    return " ".join(words)


def _fts5(terms: list[Term]) -> str:
    return " AND ".join(f'"{" ".join(term.words)}"{" *" if term.is_open else ""}' for term in terms)


def _tsquery(terms: list[Term]) -> str:
    def one(term: Term) -> str:
        words = [f"'{word}'" for word in term.words]
        return " <-> ".join([*words[:-1], words[-1] + (":*" if term.is_open else "")])

    return " & ".join(f"({one(term)})" for term in terms)
