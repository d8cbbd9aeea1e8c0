"""Modules that projects are put together from: their right source, how to call them, and mistakes that can be made.

Invariants: a docstring says all that its function must do; every mistake ends and is seen by some call (a test tries
each of them).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Maker = Callable[[random.Random], tuple[Any, ...]]


@dataclass(frozen=True)
class Part:
    """A module: functions by name, each with a maker of arguments, and mistakes (a text and what replaces it)."""

    name: str
    source: str
    functions: Mapping[str, Maker]
    mistakes: tuple[tuple[str, str], ...]


def _numbers(rng: random.Random, low: int = -9, high: int = 20, least: int = 0) -> list[int]:
    return [rng.randint(low, high) for _ in range(rng.randint(least, least + 7))]


def _words(rng: random.Random, least: int = 0) -> list[str]:
    return rng.choices(["red", "Blue", "x1", "a-b", "sky", "of", "LONG", "longer", "tea"], k=rng.randint(least, 8))


def _spans(rng: random.Random) -> list[list[int]]:
    begins = [rng.randint(0, 20) for _ in range(rng.randint(0, 6))]
    return [[begin, begin + rng.randint(1, 6)] for begin in begins]


def _grid(rng: random.Random) -> list[list[int]]:
    width = rng.randint(1, 4)
    return [[rng.randint(0, 9) for _ in range(width)] for _ in range(rng.randint(1, 4))]


NUMERALS = (
    ("", "M", "MM", "CM", "CD", "DC", "C"),
    ("", "X", "XL", "XC", "LXX", "XX"),
    ("I", "IV", "IX", "VI", "III", "V"),
)

CALENDAR = Part(
    "calendar_days",
    '''"""Days of months and years."""


def days_in_month(year, month):
    """Number of days of a month (1 to 12). February has 29 days in years divisible by 4, but not in those divisible
    by 100, unless they are divisible by 400."""
    if month == 2:
        is_leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
        return 29 if is_leap else 28
    return 30 if month in (4, 6, 9, 11) else 31


def day_of_year(year, month, day):
    """Which day of its year a date is; the first of January is 1."""
    return sum(days_in_month(year, earlier) for earlier in range(1, month)) + day
''',
    {
        "days_in_month": lambda rng: (
            rng.choice([1900, 2000, 2023, 2024, 2100, 2400]),
            rng.choice([2, 2, 4, 7, 9, 12]),
        ),
        "day_of_year": lambda rng: (rng.choice([1900, 2000, 2023, 2024]), rng.randint(1, 12), rng.randint(1, 28)),
    },
    (
        ("(year % 100 != 0 or year % 400 == 0)", "year % 100 != 0"),
        ("(4, 6, 9, 11)", "(4, 6, 8, 11)"),
        ("range(1, month)", "range(1, month + 1)"),
        ("29 if is_leap else 28", "28 if is_leap else 29"),
    ),
)
BILLS = Part(
    "bills",
    '''"""Amounts of money, in cents."""


def split_evenly(cents, people):
    """A list of what each of some people pays: shares differ by one cent at most, larger ones come first, and
    together they are the whole amount."""
    share, rest = divmod(cents, people)
    return [share + 1] * rest + [share] * (people - rest)


def shown(cents):
    """An amount as text: `12.05`, `-0.50`, with commas between thousands as in `1,234.00`."""
    sign = "-" if cents < 0 else ""
    whole, part = divmod(abs(cents), 100)
    return f"{sign}{whole:,}.{part:02}"
''',
    {
        "split_evenly": lambda rng: (rng.randint(0, 500), rng.randint(1, 7)),
        "shown": lambda rng: (rng.randint(-300, 300) if rng.random() < 0.5 else 5 * rng.randint(-(10**6), 10**6),),
    },
    (
        ("[share + 1] * rest + [share] * (people - rest)", "[share] * (people - rest) + [share + 1] * rest"),
        ("[share + 1] * rest", "[share] * rest"),
        ("{part:02}", "{part}"),
        ("abs(cents), 100", "cents, 100"),
        ("{whole:,}", "{whole}"),
    ),
)
SPANS = Part(
    "spans",
    '''"""Intervals as pairs of a begin and an end."""


def merged(spans):
    """The intervals joined where they overlap or touch, sorted by their begin, as lists."""
    found = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([begin, end])
    return found


def most_at_once(spans):
    """The largest number of intervals that share a moment; one that ends when another begins does not share it."""
    events = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    open_now = most = 0
    for _, change in events:
        open_now += change
        most = max(most, open_now)
    return most
''',
    {"merged": lambda rng: (_spans(rng),), "most_at_once": lambda rng: (_spans(rng),)},
    (
        ("begin <= found[-1][1]", "begin < found[-1][1]"),
        ("max(found[-1][1], end)", "end"),
        ("in sorted(spans)", "in spans"),
        ("(begin, 1) for", "(begin, -1) for"),
        ("most = max(most, open_now)", "most = open_now"),
    ),
)
GRIDS = Part(
    "grids",
    '''"""Tables of numbers, as lists of rows."""


def turned(grid):
    """The table turned by a quarter, clockwise."""
    return [list(column) for column in zip(*grid[::-1])]


def saddle(grid):
    """The first number, row by row, that is the largest of its row and the smallest of its column; None without one."""
    for row in grid:
        for at, number in enumerate(row):
            if number == max(row) and number == min(other[at] for other in grid):
                return number
    return None
''',
    {"turned": lambda rng: (_grid(rng),), "saddle": lambda rng: (_grid(rng),)},
    (
        ("zip(*grid[::-1])", "zip(*grid)"),
        ("zip(*grid[::-1])", "list(zip(*grid))[::-1]"),
        ("min(other[at]", "max(other[at]"),
        ("number == max(row) and", "number == max(row) or"),
    ),
)
STOCK = Part(
    "stock",
    '''"""What a store holds."""


def after(start, events):
    """What is held after some events, as a dictionary without items of which nothing is left. An event is
    [action, item, number] with the action `in`, `out` or `set`; `out` never takes more than there is."""
    held = dict(start)
    for action, item, number in events:
        if action == "in":
            held[item] = held.get(item, 0) + number
        elif action == "out":
            held[item] = max(0, held.get(item, 0) - number)
        else:
            held[item] = number
    return {item: number for item, number in held.items() if number > 0}


def short(held, wanted):
    """The items of which less is held than is wanted, sorted by name."""
    return sorted(item for item, number in wanted.items() if held.get(item, 0) < number)
''',
    {
        "after": lambda rng: (
            {item: rng.randint(1, 5) for item in rng.sample("abcd", rng.randint(0, 3))},
            [
                [rng.choice(["in", "out", "out", "set"]), rng.choice("abcd"), rng.randint(0, 6)]
                for _ in range(rng.randint(0, 6))
            ],
        ),
        "short": lambda rng: (
            {item: rng.randint(1, 5) for item in rng.sample("abcd", 3)},
            {item: rng.randint(1, 5) for item in rng.sample("abcd", 3)},
        ),
    },
    (
        ("max(0, held.get(item, 0) - number)", "held.get(item, 0) - number"),
        ("held.get(item, 0) + number", "number"),
        (" if number > 0}", "}"),
        ("held.get(item, 0) < number", "held.get(item, 0) <= number"),
        ("held.get(item, 0) < number", "item in held and held[item] < number"),
    ),
)
ROMAN = Part(
    "roman",
    '''"""Roman numerals."""

PIECES = [(1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL"),
          (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")]


def to_roman(number):
    """A number from 1 to 3999 as a Roman numeral: 1994 is `MCMXCIV`."""
    text = ""
    for value, piece in PIECES:
        count, number = divmod(number, value)
        text += piece * count
    return text


def from_roman(text):
    """The number that a Roman numeral stands for, in capital or small letters."""
    text, total = text.upper(), 0
    for value, piece in PIECES:
        while text.startswith(piece):
            text, total = text[len(piece):], total + value
    return total
''',
    {
        "to_roman": lambda rng: (rng.choice([rng.randint(1, 3999), 4, 9, 40, 90, 400, 900]),),
        "from_roman": lambda rng: (
            rng.choice([str.upper, str.upper, str.lower])("".join(rng.choice(texts) for texts in NUMERALS)),
        ),
    },
    (
        ('(900, "CM"), ', ""),
        ('(40, "XL"),', '(45, "XL"),'),
        ("text.upper(), 0", "text, 0"),
        ('(4, "IV"), ', ""),
    ),
)
STATISTICS = Part(
    "figures",
    '''"""Figures of lists of numbers."""


def median(numbers):
    """The middle one of the sorted numbers, the mean of the two middle ones of an even number; None without any."""
    if not numbers:
        return None
    ordered, half = sorted(numbers), len(numbers) // 2
    if len(ordered) % 2:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2


def rolling_sums(numbers, width):
    """The sums of each `width` numbers in a row; an empty list if there are fewer."""
    return [sum(numbers[at:at + width]) for at in range(len(numbers) - width + 1)]
''',
    {
        "median": lambda rng: (_numbers(rng),),
        "rolling_sums": lambda rng: (_numbers(rng), rng.randint(1, 4)),
    },
    (
        ("sorted(numbers), len", "list(numbers), len"),
        ("ordered[half - 1] + ordered[half]", "ordered[half] + ordered[half + 1 - len(ordered)]"),
        ("len(numbers) - width + 1", "len(numbers) - width"),
        ("len(numbers) - width + 1", "len(numbers)"),
        ("numbers[at:at + width]", "numbers[at:width]"),
    ),
)
PATHS = Part(
    "places",
    '''"""Paths with slashes, without looking at any disk."""


def tidy(path):
    """An absolute path without empty parts and `.`, and with each `..` undoing the part before it (the top stays
    the top). It begins with a slash and ends with none, except for `/` itself."""
    kept = []
    for part in path.split("/"):
        if part == "..":
            del kept[-1:]
        elif part not in ("", "."):
            kept.append(part)
    return "/" + "/".join(kept)


def ending(path):
    """What follows the last dot of the last part, in small letters; empty without a dot, and for a name that only
    begins with one."""
    name = path.rpartition("/")[2]
    stem, _, found = name.rpartition(".")
    return found.lower() if stem else ""
''',
    {
        "tidy": lambda rng: ("/" + "/".join(rng.choices(["a", "b", "..", ".", "", "c.d"], k=rng.randint(0, 7))),),
        "ending": lambda rng: (
            rng.choice(["", "/", "/a.b/", "c/", "/v1.2/d/", "x.y/"])
            + rng.choice(["read", ".rc", ".profile", "t.TXT", "y.tar.gz", "b.Md", "plain", "z."]),
        ),
    },
    (
        ("del kept[-1:]", "kept = []"),
        ('("", ".")', '(".",)'),
        ('"/" + "/".join(kept)', '"/" + "/".join(kept) + "/"'),
        ("found.lower() if stem", "found.lower() if name"),
        ('path.rpartition("/")[2]', "path"),
    ),
)
SIZES = Part(
    "sizes",
    '''"""Lengths of time and sizes, written short."""


def seconds(text):
    """The seconds of a text such as `1h30m`, `45s` or `2d`: numbers, each followed by d, h, m or s. Spaces do not
    count."""
    total, number = 0, ""
    for letter in text.replace(" ", ""):
        if letter.isdigit():
            number += letter
        else:
            total += int(number) * {"d": 86400, "h": 3600, "m": 60, "s": 1}[letter]
            number = ""
    return total


def shortest(total):
    """Seconds in that form, the largest units first and no unit with 0: 5400 is `1h30m`, and 0 is `0s`."""
    text = ""
    for letter, worth in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, total = divmod(total, worth)
        text += f"{count}{letter}" if count else ""
    return text or "0s"
''',
    {
        "seconds": lambda rng: (
            " ".join(f"{rng.randint(0, 40)}{unit}" for unit in rng.sample("dhms", rng.randint(1, 3))),
        ),
        "shortest": lambda rng: (rng.choice([0, 60, 3600, 86400, 5400, rng.randint(1, 10**6)]),),
    },
    (
        ('"h": 3600, "m"', '"h": 360, "m"'),
        ('            number = ""\n', ""),
        (' if count else ""', ""),
        ("count, total = divmod(total, worth)", "count = total // worth"),
        ('text.replace(" ", "")', "text.strip()"),
    ),
)
RANKS = Part(
    "ranks",
    '''"""Orders of merit."""


def places(scores):
    """The place of each name by its score, the highest being 1; equal scores share a place, and the next place is
    left out for them (1, 2, 2, 4)."""
    return {name: 1 + sum(other > score for other in scores.values()) for name, score in scores.items()}


def best(scores, number):
    """The names with the highest scores, best first, equal ones by name; at most `number`."""
    return sorted(scores, key=lambda name: (-scores[name], name))[:number]
''',
    {
        "places": lambda rng: ({name: rng.randint(1, 4) for name in rng.sample("pqrstu", rng.randint(0, 5))},),
        "best": lambda rng: ({name: rng.randint(1, 4) for name in rng.sample("pqrstu", 5)}, rng.randint(0, 6)),
    },
    (
        ("other > score", "other >= score"),
        ("other > score for other in scores.values()", "other > score for other in set(scores.values())"),
        ("(-scores[name], name)", "-scores[name]"),
        ("(-scores[name], name)", "(scores[name], name)"),
        ("[:number]", "[:number + 1]"),
    ),
)
ROUTES = Part(
    "routes",
    '''"""Ways through a network; roads are pairs and go both ways."""


def _neighbours(roads):
    found = {}
    for one, other in roads:
        found.setdefault(one, set()).add(other)
        found.setdefault(other, set()).add(one)
    return found


def hops(roads, start, goal):
    """The smallest number of roads from one place to another; 0 to itself, -1 when there is no way."""
    near, seen, rim, count = _neighbours(roads), {start}, {start}, 0
    while rim:
        if goal in rim:
            return count
        rim = {place for at in rim for place in near.get(at, ())} - seen
        seen |= rim
        count += 1
    return -1


def dead_ends(roads):
    """The places with exactly one neighbour, sorted."""
    return sorted(place for place, others in _neighbours(roads).items() if len(others) == 1)
''',
    {
        "hops": lambda rng: (
            [rng.sample("abcdefg", 2) for _ in range(rng.randint(1, 7))],
            rng.choice("abc"),
            rng.choice("abcde"),
        ),
        "dead_ends": lambda rng: ([rng.sample("abcdef", 2) for _ in range(rng.randint(0, 7))],),
    },
    (
        ("        found.setdefault(other, set()).add(one)\n", ""),
        ("{start}, {start}, 0", "{start}, {start}, 1"),
        ("return -1", "return count"),
        ("len(others) == 1", "len(others) <= 2"),
    ),
)
TITLES = Part(
    "titles",
    '''"""Words of titles."""


def slug(title):
    """The words of a title (runs of letters and digits) in small letters, joined by hyphens."""
    spaced = "".join(letter if letter.isalnum() else " " for letter in title.lower())
    return "-".join(spaced.split())


def lines(words, width):
    """Words put into lines of at most `width` characters, as many as fit into each, separated by one space. A word
    that is longer has a line of its own."""
    found = []
    for word in words:
        if found and len(found[-1]) + 1 + len(word) <= width:
            found[-1] += " " + word
        else:
            found.append(word)
    return found
''',
    {
        "slug": lambda rng: (rng.choice([" ", ", ", "! ", "--", "_"]).join(_words(rng)) + rng.choice(["", "?", " "]),),
        "lines": lambda rng: (_words(rng), rng.randint(3, 14)),
    },
    (
        ("title.lower()", "title"),
        ('"-".join(spaced.split())', 'spaced.replace(" ", "-")'),
        ("+ 1 + len(word) <= width", "+ len(word) <= width"),
        ("+ 1 + len(word) <= width", "+ 1 + len(word) < width"),
    ),
)
PARTS = (CALENDAR, BILLS, SPANS, GRIDS, STOCK, ROMAN, STATISTICS, PATHS, SIZES, RANKS, ROUTES, TITLES)
