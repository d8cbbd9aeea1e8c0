"""Problems read from standard input and answered on standard output, each with an algorithm behind it.

Parts: `classic_problems`. A maker draws what varies in the statement and returns the problem. Inputs are valid for
every size from 0 upwards, which makers raise to what the statement promises.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from code_problem import Problem

Maker = Callable[[random.Random], Problem]


def _ints(rng: random.Random, count: int, low: int, high: int) -> str:
    return " ".join(str(rng.randint(low, high)) for _ in range(count))


def coins(rng: random.Random) -> Problem:
    """Fewest coins for an amount."""
    values = sorted({1, *rng.sample(range(2, 30), 3)})
    return Problem(
        "fewest coins",
        f"The coins of a country are worth {', '.join(map(str, values))}. Read an amount from 0 to 2000 and print the "
        "smallest number of coins that pays it exactly.",
        f"amount = int(input())\nbest = [0]\nfor total in range(1, amount + 1):\n"
        f"    best.append(1 + min(best[total - coin] for coin in {values} if coin <= total))\nprint(best[amount])\n",
        lambda rng, size: f"{rng.randint(size, size * 20)}\n",
    )


def caesar(rng: random.Random) -> Problem:
    """A shifted alphabet."""
    shift = rng.randint(1, 25)
    return Problem(
        "shifted letters",
        f"Read one line of text. Replace each letter by the one {shift} places further in the alphabet (after z comes "
        "a), keep capitals as capitals and everything else as it is, and print the line.",
        f"def turned(c):\n    if not c.isalpha():\n        return c\n    base = ord('A' if c.isupper() else 'a')\n"
        f"    return chr((ord(c) - base + {shift}) % 26 + base)\n\nprint(''.join(turned(c) for c in input()))\n",
        lambda rng, size: "".join(rng.choice("abcxyzABCXYZ mnNM,.!7") for _ in range(size + 1)) + "!\n",
    )


def runs(rng: random.Random) -> Problem:
    """Run-length encoding."""
    joiner = rng.choice(["", "-", ",", "/"])
    shown = f"separated by `{joiner}`" if joiner else "with nothing between them"
    return Problem(
        "runs of letters",
        "Read a word. Print each run of equal letters as the letter followed by the length of the run, the runs "
        f"{shown}: the letter is printed alone when its run has length 1.",
        "from itertools import groupby\n\nruns = [(c, len(list(g))) for c, g in groupby(input())]\n"
        f"print({joiner!r}.join(c if n == 1 else c + str(n) for c, n in runs))\n",
        lambda rng, size: "".join(rng.choice("abc") * rng.randint(1, 4) for _ in range(size // 3 + 1)) + "\n",
    )


def brackets(rng: random.Random) -> Problem:
    """Balanced brackets."""
    yes, no = rng.choice([("yes", "no"), ("balanced", "broken"), ("1", "0"), ("good", "bad")])
    return Problem(
        "brackets",
        "Read a line of the characters ( ) [ ] { }. Print "
        f"`{yes}` if every bracket is closed by its own kind in the right order, else `{no}`. The line may be empty.",
        "pairs = {')': '(', ']': '[', '}': '{'}\nopened, good = [], True\nfor c in input():\n    if c in '([{':\n"
        "        opened.append(c)\n    elif not opened or opened.pop() != pairs[c]:\n        good = False\n"
        "        break\n"
        f"print({yes!r} if good and not opened else {no!r})\n",
        _bracket_line,
    )


def _bracket_line(rng: random.Random, size: int) -> str:
    line, opened = "", ""
    for _ in range(size):
        if opened and rng.random() < 0.5:
            line, opened = line + opened[-1], opened[:-1]
        else:
            pair = rng.choice(["()", "[]", "{}"])
            line, opened = line + pair[0], opened + pair[1]
    line += opened[::-1]
    if rng.random() < 0.5 and line:
        at = rng.randrange(len(line))
        line = line[:at] + rng.choice("()[]{}") + line[at + 1 :]
    return line + "\n"


def grid(rng: random.Random) -> Problem:
    """Shortest way through a maze."""
    missing = rng.choice(["-1", "none", "unreachable"])
    diagonal = rng.random() < 0.5
    steps = [(0, 1), (0, -1), (1, 0), (-1, 0)] + ([(1, 1), (1, -1), (-1, 1), (-1, -1)] if diagonal else [])
    how = "up, down, left, right or diagonally" if diagonal else "up, down, left or right"
    return Problem(
        "shortest way",
        "The first line has the numbers of rows and columns of a map; the rows follow, `.` is free and `#` is a wall. "
        f"One step goes {how}. Print the smallest number of steps from the top left to the bottom right corner, or "
        f"`{missing}` if there is no way; both corners are free.",
        "from collections import deque\n\nheight, width = map(int, input().split())\n"
        "rows = [input() for _ in range(height)]\nseen, queue = {(0, 0): 0}, deque([(0, 0)])\nwhile queue:\n"
        f"    r, c = queue.popleft()\n    for dr, dc in {steps}:\n        at = (r + dr, c + dc)\n"
        "        if 0 <= at[0] < height and 0 <= at[1] < width and rows[at[0]][at[1]] == '.' and at not in seen:\n"
        "            seen[at] = seen[r, c] + 1\n            queue.append(at)\n"
        f"print(seen.get((height - 1, width - 1), {missing!r}))\n",
        _maze,
    )


def _maze(rng: random.Random, size: int) -> str:
    height, width = 1 + size // 6, 1 + size // 5
    rows = [[rng.choice("....#.") for _ in range(width)] for _ in range(height)]
    rows[0][0] = rows[-1][-1] = "."
    return "\n".join([f"{height} {width}", *("".join(row) for row in rows)]) + "\n"


def intervals(rng: random.Random) -> Problem:
    """Union of intervals."""
    touch = rng.random() < 0.5
    rule = "also when one ends where the other begins" if touch else "but not when they only touch"
    sign = "<=" if touch else "<"
    return Problem(
        "intervals",
        "The first line has a number n from 1 to 100; n lines follow, each with the begin and the end of an interval "
        f"(begin < end). Merge intervals that overlap, {rule}. Print how many remain and their total length.",
        "n = int(input())\nspans = sorted(tuple(map(int, input().split())) for _ in range(n))\n"
        "merged = [list(spans[0])]\n"
        f"for begin, end in spans[1:]:\n    if begin {sign} merged[-1][1]:\n"
        "        merged[-1][1] = max(end, merged[-1][1])\n    else:\n        merged.append([begin, end])\n"
        "print(len(merged), sum(end - begin for begin, end in merged))\n",
        _spans,
    )


def _spans(rng: random.Random, size: int) -> str:
    lines = []
    for _ in range(size + 1):
        begin = rng.randint(0, 10 + 4 * size)
        lines.append(f"{begin} {begin + rng.randint(1, 8)}")
    return "\n".join([str(len(lines)), *lines]) + "\n"


def josephus(rng: random.Random) -> Problem:
    """Counting out."""
    k = rng.randint(2, 9)
    return Problem(
        "counting out",
        f"n people (1 to 500) stand in a circle, numbered from 1. Counting from person 1, every person number {k} "
        "leaves and the count goes on with the next one, until one is left. Read n and print the number of the last "
        "person.",
        f"at = 0\nfor size in range(2, int(input()) + 1):\n    at = (at + {k}) % size\nprint(at + 1)\n",
        lambda rng, size: f"{rng.randint(1, 1 + 6 * size)}\n",
    )


def subsequence(rng: random.Random) -> Problem:
    """Longest growing subsequence."""
    strict = rng.random() < 0.5
    word = "greater than" if strict else "at least as great as"
    bisect = "bisect_left" if strict else "bisect_right"
    return Problem(
        "longest growing subsequence",
        "Read one line of 1 to 500 whole numbers. Print the length of the longest subsequence (not necessarily of "
        f"neighbours) in which each number is {word} the one before it.",
        f"from bisect import {bisect}\n\nends = []\nfor number in map(int, input().split()):\n"
        f"    at = {bisect}(ends, number)\n    ends[at : at + 1] = [number]\nprint(len(ends))\n",
        lambda rng, size: _ints(rng, size + 1, -9, 9 + size) + "\n",
    )


def base(rng: random.Random) -> Problem:
    """Numbers in another base."""
    radix = rng.choice([3, 4, 5, 6, 7, 9, 11, 12, 13])
    return Problem(
        "another base",
        f"Read a whole number, which may be negative, and print it in base {radix}; the digits after 9 are a, b, c.",
        f"number = int(input())\ndigits, rest = '', abs(number)\nwhile rest:\n"
        f"    rest, digit = divmod(rest, {radix})\n    digits = '0123456789abc'[digit] + digits\n"
        "print(('-' if number < 0 else '') + (digits or '0'))\n",
        lambda rng, size: f"{rng.randint(-(size**3), size**4)}\n",
    )


def edits(rng: random.Random) -> Problem:
    """Edit distance with a price."""
    price = rng.randint(1, 3)
    return Problem(
        "edit distance",
        "Two lines have a word each, up to 60 letters. Inserting or deleting a letter costs 1, replacing one costs "
        f"{price}. Print the smallest cost of turning the first word into the second.",
        "first, second = input(), input()\nrow = list(range(len(second) + 1))\nfor i, a in enumerate(first, 1):\n"
        "    diagonal, row[0] = row[0], i\n    for j, b in enumerate(second, 1):\n"
        f"        diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (0 if a == b else {price}))\n"
        "print(row[-1])\n",
        lambda rng, size: "".join(
            "".join(rng.choice("abcd") for _ in range(1 + size * 3 // 4)) + "\n" for _ in range(2)
        ),
    )


def divisors(rng: random.Random) -> Problem:
    """Numbers with a given number of divisors."""
    count = rng.choice([2, 3, 4, 6, 8])
    return Problem(
        "divisors",
        f"Read two numbers a and b, 1 <= a <= b <= 5000. Print how many whole numbers from a to b have exactly {count} "
        "divisors (1 and the number itself count).",
        "a, b = map(int, input().split())\ncounts = [0] * (b + 1)\nfor d in range(1, b + 1):\n"
        "    for multiple in range(d, b + 1, d):\n        counts[multiple] += 1\n"
        f"print(counts[a:].count({count}))\n",
        lambda rng, size: f"{1 + rng.randint(0, size)} {1 + size + rng.randint(0, 20 * size)}\n",
    )


def transpose(rng: random.Random) -> Problem:
    """A turned matrix."""
    turn = rng.choice(["clockwise", "counterclockwise"])
    code = "zip(*rows[::-1])" if turn == "clockwise" else "list(zip(*rows))[::-1]"
    joiner = rng.choice([" ", ",", ";"])
    return Problem(
        "turned table",
        "The first line has the number of rows of a table, from 1; the rows follow, numbers separated by spaces. Turn "
        f"the table by 90 degrees {turn} and print its rows, the numbers separated by `{joiner}`.",
        f"rows = [input().split() for _ in range(int(input()))]\nfor row in {code}:\n    print({joiner!r}.join(row))\n",
        _table,
    )


def _table(rng: random.Random, size: int) -> str:
    height, width = 1 + size // 8, 1 + size // 10 + rng.randint(0, 1)
    return "\n".join([str(height), *(_ints(rng, width, 0, 99) for _ in range(height))]) + "\n"


MAKERS: tuple[Maker, ...] = (
    coins, caesar, runs, brackets, grid, intervals, josephus, subsequence, base, edits, divisors, transpose,
)  # fmt: skip


def classic_problems(rng: random.Random) -> list[Problem]:
    """Every variant that some draws bring up, each statement once, in a drawn order."""
    found = {}
    for maker in MAKERS:
        for _ in range(60):
            problem = maker(rng)
            found.setdefault(problem.statement, problem)
    problems = list(found.values())
    rng.shuffle(problems)
    return problems
