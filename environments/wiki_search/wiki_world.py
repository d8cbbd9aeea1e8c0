"""An encyclopedia of a country that does not exist, and questions about it.

No model has read about it, so every answer has to be found. Parts: `make_world` (pages), `make_questions`. People,
towns, rivers, schools, ships and inventions are drawn by a seed; each page states its own facts and names its
neighbours, so that a question of several hops is a walk from page to page. Invariant: a fact stands on one page only,
in words, and names are never drawn twice.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

CONSONANTS = ["b", "br", "d", "dr", "f", "g", "gr", "h", "k", "l", "m", "n", "p", "r", "s", "st", "t", "tr", "v", "w"]
VOWELS = ["a", "e", "i", "o", "u", "ae", "ei", "ou"]
ENDINGS = {
    "person": ["n", "s", "ra", "l", "th", "ne", "mir", "dis"],
    "town": ["stead", "haven", "mark", "ford", "wick", "mere", "holm"],
    "river": ["ra", "lo", "una", "esse", "ine"],
    "school": ["ian Academy", "ian College", "ian Institute"],
    "ship": ["ia", "ora", "ette", "ane"],
    "invention": ["scope", "graph", "phone", "meter", "lathe", "pump", "loom"],
}
TRADES = [
    "glassmaker",
    "astronomer",
    "botanist",
    "cartographer",
    "clockmaker",
    "engineer",
    "poet",
    "physician",
    "chemist",
]
TRAITS = ["its blue slate roofs", "its salt market", "its floating gardens", "its bell tower", "its amber mines"]
WOODS = ["oak", "larch", "teak", "elm", "cedar", "pine"]


@dataclass
class Page:
    """An article: facts by relation (`born in` -> a town's name), and sections of text."""

    kind: str
    title: str
    facts: dict[str, str] = field(default_factory=dict)
    sections: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Relation:
    """One kind of fact: where it stands, what it leads to, and how it is asked of a noun phrase `{}`."""

    kind: str
    name: str
    target: str
    asked: str


RELATIONS = (
    Relation("person", "born in", "town", "the town in which {} was born"),
    Relation("person", "taught at", "school", "the school at which {} taught"),
    Relation("person", "year of birth", "value", "the year in which {} was born"),
    Relation("person", "trade", "value", "the trade of {}"),
    Relation("town", "lies on", "river", "the river on which {} lies"),
    Relation("town", "founder", "person", "the founder of {}"),
    Relation("town", "year of foundation", "value", "the year in which {} was founded"),
    Relation("river", "length", "value", "the length in kilometres of {}"),
    Relation("river", "mouth", "town", "the town at the mouth of {}"),
    Relation("school", "seat", "town", "the town in which {} has its seat"),
    Relation("school", "first rector", "person", "the first rector of {}"),
    Relation("school", "number of students", "value", "the number of students of {}"),
    Relation("ship", "captain", "person", "the captain of the {}"),
    Relation("ship", "home port", "town", "the home port of the {}"),
    Relation("ship", "wood", "value", "the wood of which the {} was built"),
    Relation("invention", "inventor", "person", "the inventor of the {}"),
    Relation("invention", "year of invention", "value", "the year in which the {} was invented"),
)
COUNTS = {"person": 90, "town": 40, "river": 20, "school": 20, "ship": 40, "invention": 60}


def _name(rng: random.Random, kind: str) -> str:
    stem = "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(2)).capitalize()
    if kind == "person":
        family = "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(2)).capitalize()
        return f"{stem}{rng.choice(ENDINGS[kind])} {family}{rng.choice('lnrst')}"
    return stem + rng.choice(ENDINGS[kind])


def make_world(seed: int) -> dict[str, Page]:
    """All pages by title."""
    rng = random.Random(f"world/{seed}")
    titles: dict[str, list[str]] = {}
    taken: set[str] = set()
    for kind, count in COUNTS.items():
        titles[kind] = []
        while len(titles[kind]) < count:
            name = _name(rng, kind)
            if name not in taken:
                taken.add(name)
                titles[kind].append(name)
    pages = {title: Page(kind, title) for kind, names in titles.items() for title in names}
    for page in pages.values():
        for relation in RELATIONS:
            if relation.kind == page.kind:
                page.facts[relation.name] = _target(rng, relation, titles)
        page.sections = dict(_sections(page, rng))
    return pages


def _target(rng: random.Random, relation: Relation, titles: dict[str, list[str]]) -> str:
    if relation.target != "value":
        return rng.choice(titles[relation.target])
    match relation.name:
        case "trade":
            return rng.choice(TRADES)
        case "wood":
            return rng.choice(WOODS)
        case "length":
            return str(rng.randint(40, 900))
        case "number of students":
            return str(rng.randint(12, 900))
        case _:
            return str(rng.randint(1500, 1899))


def _sections(page: Page, rng: random.Random) -> Iterator[tuple[str, str]]:
    """The text of a page. Facts are spread over its sections, so that the first one rarely answers the question."""
    f, title = page.facts, page.title
    trait, other = rng.choice(TRAITS), rng.choice(TRADES)
    match page.kind:
        case "person":
            yield "Overview", f"{title} was a {f['trade']} who is remembered all over the country."
            yield "Early life", f"{title} was born in {f['born in']} in {f['year of birth']}, a child of a {other}."
            yield "Career", f"After years of travel, {title} taught at {f['taught at']} and took on many students."
        case "town":
            yield "Overview", f"{title} is a town known for {trait}. It lies on the river {f['lies on']}."
            yield "History", f"{title} was founded in {f['year of foundation']} by {f['founder']} after a great flood."
        case "river":
            yield "Overview", f"The {title} is a river that is {f['length']} kilometres long."
            yield "Course", f"From the hills the {title} runs past farms and reaches the sea at {f['mouth']}."
        case "school":
            yield "Overview", f"{title} is a school with {f['number of students']} students and a large library."
            yield (
                "History",
                f"Its seat is in {f['seat']}. The first rector was {f['first rector']}, against some protest.",
            )
        case "ship":
            yield "Overview", f"The {title} was a trading ship built of {f['wood']} and known to be hard to steer."
            yield (
                "Service",
                f"The {title} sailed from its home port {f['home port']}, and its captain was {f['captain']}.",
            )
        case "invention":
            yield "Overview", f"The {title} is a device that changed daily life in the country."
            yield "Origin", f"It was invented in {f['year of invention']} by {f['inventor']}, who never sold it."


def make_questions(pages: dict[str, Page], num_rows: int, *, hops: list[int], seed: str) -> list[dict[str, Any]]:
    """Different questions; `info.path` names the pages that lead to the answer, in order."""
    rng = random.Random(seed)
    titles = sorted(pages)
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < num_rows:
        number = rng.choice(hops)
        walk = _walk(rng, pages, rng.choice(titles), number)
        if walk is None:
            continue
        phrase, answer, path = walk
        question = f"What is {phrase}?"
        rows.setdefault(question, {"question": question, "answer": answer, "info": {"path": path, "num_hops": number}})
    return list(rows.values())


def _walk(rng: random.Random, pages: dict[str, Page], start: str, hops: int) -> tuple[str, str, list[str]] | None:
    """From a page along relations; the last one may end at a value, the others at pages not yet seen."""
    phrase, at, path = start, start, [start]
    for hop in range(hops):
        is_last = hop == hops - 1
        kind = pages[at].kind
        choices = [r for r in RELATIONS if r.kind == kind and (is_last or r.target != "value")]
        relation = rng.choice(choices) if choices else None
        if relation is None:
            return None
        phrase, at = relation.asked.format(phrase), pages[at].facts[relation.name]
        if is_last:
            return phrase.replace("the the", "the"), at, path
        if at in path:
            return None
        path = [*path, at]
    return None
