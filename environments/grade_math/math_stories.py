"""Word problems of two to five steps, with the steps that solve them.

Parts: `Problem`, `story`. A maker draws numbers until the answer is whole and positive, tells the story and writes down
the steps; every step is a sum whose value is worked out here, so that a solution cannot be wrong where its answer is
right.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

NAMES = ["Ada", "Bela", "Chidi", "Dana", "Emil", "Farah", "Goran", "Hana", "Ivo", "Jun", "Kofi", "Lena", "Mira", "Noor"]
GOODS = ["apples", "pencils", "stamps", "marbles", "candles", "postcards", "buttons", "shells", "stickers", "biscuits"]
PLACES = ["a market", "a school", "a library", "a garden club", "a bakery", "a workshop", "a summer camp"]


class Problem(NamedTuple):
    """A question, its answer as it would be written, the steps to it, and the family it is of."""

    question: str
    answer: str
    steps: list[str]
    family: str


Maker = Callable[[random.Random], Problem | None]


def story(rng: random.Random) -> Problem:
    """A word problem whose numbers come out whole."""
    while True:
        problem = rng.choice(MAKERS)(rng)
        if problem is not None:
            return problem


def _told(family: str, text: str, *steps: tuple[str, int]) -> Problem:
    """The last step's value is the answer."""
    lines = [f"{words} = {value}" for words, value in steps]
    return Problem(text, str(steps[-1][1]), lines, family)


def shop(rng: random.Random) -> Problem | None:
    """Prices, amounts, change."""
    name, (a, b) = rng.choice(NAMES), rng.sample(GOODS, 2)
    n, p, m, q = rng.randint(2, 9), rng.randint(2, 15), rng.randint(2, 9), rng.randint(2, 15)
    paid = rng.choice([50, 100, 200, 500])
    cost = n * p + m * q
    if cost >= paid:
        return None
    text = (
        f"{name} buys {n} boxes of {a} at ${p} a box and {m} boxes of {b} at ${q} a box, and pays with ${paid}. "
        f"How many dollars of change does {name} get?"
    )
    return _told("shop", text, (f"{n} * {p}", n * p), (f"{m} * {q}", m * q), (f"{n * p} + {m * q}", cost),
                 (f"{paid} - {cost}", paid - cost))  # fmt: skip


def sharing(rng: random.Random) -> Problem | None:
    """Given away, found, shared out."""
    name, good = rng.choice(NAMES), rng.choice(GOODS)
    start, gone, more, friends = rng.randint(20, 90), rng.randint(3, 19), rng.randint(2, 40), rng.randint(2, 9)
    rest = start - gone + more
    if rest % friends:
        return None
    text = (
        f"{name} has {start} {good}, loses {gone} of them and then finds {more} others. All of them are shared equally "
        f"among {friends} friends. How many {good} does each friend get?"
    )
    return _told("sharing", text, (f"{start} - {gone}", start - gone), (f"{start - gone} + {more}", rest),
                 (f"{rest} / {friends}", rest // friends))  # fmt: skip


def percent(rng: random.Random) -> Problem | None:
    """A share of a share."""
    place, total = rng.choice(PLACES), rng.randint(2, 40) * 20
    first, second = rng.choice([10, 20, 25, 30, 40, 50, 60, 75]), rng.choice([10, 20, 25, 50, 75])
    adults = total * first // 100
    if total * first % 100 or adults * second % 100:
        return None
    young = total - adults
    text = (
        f"{total} people visit {place}. {first}% of them are adults, and {second}% of the adults wear a hat. None of "
        "the others wears one. How many people wear no hat?"
    )
    hats = adults * second // 100
    return _told("percent", text, (f"{total} * {first} / 100", adults), (f"{adults} * {second} / 100", hats),
                 (f"{total} - {hats}", young + adults - hats))  # fmt: skip


def journey(rng: random.Random) -> Problem | None:
    """Speeds and times."""
    name = rng.choice(NAMES)
    v, h, w, k = rng.randint(30, 90), rng.randint(1, 5), rng.randint(4, 25), rng.randint(1, 4)
    text = (
        f"{name} drives for {h} hours at {v} km/h, rests for {k} hours, and then cycles for {k + 1} hours at {w} km/h. "
        f"How many kilometres does {name} cover?"
    )
    return _told("journey", text, (f"{h} * {v}", h * v), (f"{k + 1} * {w}", (k + 1) * w),
                 (f"{h * v} + {(k + 1) * w}", h * v + (k + 1) * w))  # fmt: skip


def ages(rng: random.Random) -> Problem | None:
    """Ages compared."""
    a, b, c = rng.sample(NAMES, 3)
    base, times, gap, years = rng.randint(3, 14), rng.randint(2, 4), rng.randint(1, 9), rng.randint(1, 12)
    older, oldest = base * times, base * times + gap
    text = (
        f"{a} is {base} years old. {b} is {times} times as old as {a}, and {c} is {gap} years older than {b}. What is "
        f"the sum of their ages in {years} years?"
    )
    total = base + older + oldest
    return _told("ages", text, (f"{base} * {times}", older), (f"{older} + {gap}", oldest),
                 (f"{base} + {older} + {oldest}", total), (f"{total} + 3 * {years}", total + 3 * years))  # fmt: skip


def wages(rng: random.Random) -> Problem | None:
    """Hours, overtime and rent."""
    name, pay = rng.choice(NAMES), rng.randint(5, 20) * 2
    hours, over, rent = rng.randint(20, 40), rng.randint(1, 10), rng.randint(50, 400)
    regular, extra = hours * pay, over * pay * 3 // 2
    if regular + extra <= rent:
        return None
    text = (
        f"{name} earns ${pay} an hour and half as much again for each hour of overtime. In a week of {hours} regular "
        f"hours and {over} hours of overtime, {name} also pays ${rent} of rent. How many dollars are left?"
    )
    return _told("wages", text, (f"{hours} * {pay}", regular), (f"{over} * {pay} * 3 / 2", extra),
                 (f"{regular} + {extra}", regular + extra),
                 (f"{regular + extra} - {rent}", regular + extra - rent))  # fmt: skip


def tank(rng: random.Random) -> Problem | None:
    """Filled and emptied."""
    fill, drain, start = rng.randint(6, 30), rng.randint(1, 5), rng.randint(0, 60)
    minutes = rng.randint(5, 40)
    full = start + (fill - drain) * minutes
    text = (
        f"A tank holds {start} litres. A pump adds {fill} litres a minute while a leak loses {drain} litres a minute, "
        f"and after some minutes the tank holds {full} litres. How many minutes is that?"
    )
    return _told("tank", text, (f"{fill} - {drain}", fill - drain), (f"{full} - {start}", full - start),
                 (f"{full - start} / {fill - drain}", minutes))  # fmt: skip


def fence(rng: random.Random) -> Problem | None:
    """A field and its fence."""
    width, times, gate, price = rng.randint(4, 40), rng.randint(2, 4), rng.randint(2, 6), rng.randint(3, 15)
    length = width * times
    around = 2 * (width + length) - gate
    text = (
        f"A field is {width} m wide and {times} times as long. It gets a fence all around, except for a gate of {gate} "
        f"m. A metre of fence costs ${price}. How many dollars does the fence cost?"
    )
    return _told("fence", text, (f"{width} * {times}", length), (f"2 * ({width} + {length}) - {gate}", around),
                 (f"{around} * {price}", around * price))  # fmt: skip


def mixture(rng: random.Random) -> Problem | None:
    """Parts of a whole."""
    a, b = rng.sample(GOODS, 2)
    x, y, k = rng.randint(1, 7), rng.randint(1, 7), rng.randint(3, 20)
    if x == y:
        return None
    total = (x + y) * k
    text = (
        f"In a chest there are {total} things, {a} and {b}. For every {x} {a} there are {y} {b}. How many more or "
        f"fewer {a} than {b} are there? Give the difference as a positive number."
    )
    return _told("mixture", text, (f"{total} / ({x} + {y})", k), (f"{x} * {k}", x * k), (f"{y} * {k}", y * k),
                 (f"{max(x, y) * k} - {min(x, y) * k}", abs(x - y) * k))  # fmt: skip


def backwards(rng: random.Random) -> Problem | None:
    """The end is known, the start is asked."""
    name, good = rng.choice(NAMES), rng.choice(GOODS)
    start, gave = rng.randint(4, 40) * 2, rng.randint(1, 9)
    bought = rng.randint(3, 30)
    end = start // 2 - gave + bought
    if start // 2 <= gave:
        return None
    text = (
        f"{name} gives away half of the {good} in a bag, then {gave} more, then buys {bought} and has {end}. How many "
        f"{good} were in the bag at first?"
    )
    return _told("backwards", text, (f"{end} - {bought}", end - bought), (f"{end - bought} + {gave}", start // 2),
                 (f"{start // 2} * 2", start))  # fmt: skip


MAKERS: tuple[Maker, ...] = (shop, sharing, percent, journey, ages, wages, tank, fence, mixture, backwards)
