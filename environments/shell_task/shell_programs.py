"""Jobs that ask for a program: scripts to write or to repair, tried in a fresh machine on inputs that are not shown.

Parts: the makers. A maker has a Python function that says what is right; the examples in the folder and the hidden
cases come from it. Invariant: what a case expects never enters a machine.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from shell_job import NOUNS, PEOPLE, Job, lines, sentence
from shell_leftovers import Case, prints

NUM_HIDDEN = 4
NUM_SHOWN = 2
Solve = Callable[[str], str]


def _cases(rng: random.Random, solve: Solve, make: Callable[[random.Random], str]) -> list[Case]:
    return [Case(solve(text), stdin=text) for text in (make(rng) for _ in range(NUM_SHOWN + NUM_HIDDEN))]


def _examples(cases: list[Case]) -> dict[str, str]:
    shown = enumerate(cases[:NUM_SHOWN], 1)
    return {f"examples/{n}.{end}": t for n, case in shown for end, t in (("in", case.stdin), ("out", case.expected))}


def _written(name: str, source: str) -> str:
    return f"cat > {name} <<'END'\n{source}END"


def _tried(run: str) -> str:
    return f'for i in examples/*.in; do {run} < $i | diff - "${{i%.in}}.out" && echo same; done'


def _rows(rng: random.Random) -> str:
    keys = rng.sample(NOUNS, 5)
    return lines([f"{rng.choice(keys)} {rng.randint(-20, 99)}" for _ in range(rng.randint(4, 25))])


def shell_filter(rng: random.Random) -> Job:
    """A filter over lines of a word and a number."""
    limit = rng.randint(5, 40)
    kinds: list[tuple[str, Solve, str]] = [
        (
            f"the lines whose number is at least {limit}, in the order in which they come",
            lambda text: lines([row for row in text.splitlines() if int(row.split()[1]) >= limit]),
            f"awk '$2 >= {limit}'",
        ),
        (
            f"for each word the sum of its numbers as `WORD SUM`, sorted by word, without sums below {limit}",
            lambda text: lines([f"{w} {n}" for w, n in sorted(_sums(text).items()) if n >= limit]),
            f"awk '{{n[$1] += $2}} END {{for (w in n) if (n[w] >= {limit}) print w, n[w]}}' | LC_ALL=C sort",
        ),
        (
            f"`NUMBER WORD` for every line, the number increased by {limit}, in reverse order of the lines",
            lambda text: lines([f"{int(n) + limit} {w}" for w, n in map(str.split, text.splitlines()[::-1])]),
            f"awk '{{print $2 + {limit}, $1}}' | tac",
        ),
        (
            f"the word with the most lines whose number is below {limit} (the alphabetically first such word on a "
            "tie), or `none` when there is no such line",
            lambda text: _commonest([w for w, n in map(str.split, text.splitlines()) if int(n) < limit]) + "\n",
            f"awk '$2 < {limit} {{n[$1]++}} END {{for (w in n) print n[w], w; print 0, \"none\"}}' "
            "| LC_ALL=C sort -k1,1nr -k2,2 | head -1 | cut -d' ' -f2",
        ),
    ]
    asked, solve, pipe = rng.choice(kinds)
    cases = _cases(rng, solve, _rows)
    return Job(
        f"Write a shell script `filter.sh` that reads lines `WORD NUMBER` from standard input and prints {asked}. It "
        "is run as `sh filter.sh`, from other folders, too. `examples` has inputs and what is to be printed.",
        _examples(cases),
        (_written("filter.sh", f"{pipe}\n"), _tried("sh filter.sh")),
        (prints("filter.sh", ("sh",), cases[NUM_SHOWN:]),),
    )


def _sums(text: str) -> Counter[str]:
    sums: Counter[str] = Counter()
    for word, number in map(str.split, text.splitlines()):
        sums[word] += int(number)
    return sums


def _commonest(words: list[str]) -> str:
    counts = Counter(words)
    return min(counts, key=lambda word: (-counts[word], word)) if counts else "none"


def python_report(rng: random.Random) -> Job:
    """A program over a table, with an argument."""
    columns = ["name", "team", "points"]
    what, function = rng.choice([("largest", "max"), ("smallest", "min"), ("sum of the", "sum")])
    divider = rng.choice([":", "=", " -> "])

    def table(rng: random.Random) -> str:
        rows = [f"{rng.choice(PEOPLE)},{rng.choice(NOUNS[:6])},{rng.randint(0, 50)}" for _ in range(rng.randint(5, 20))]
        return lines([",".join(columns), *rows])

    def solve(text: str, key: str) -> str:
        found: dict[str, list[int]] = {}
        for row in text.splitlines()[1:]:
            cells = dict(zip(columns, row.split(","), strict=True))
            found.setdefault(cells[key], []).append(int(cells["points"]))
        act = {"max": max, "min": min, "sum": sum}[function]
        return lines([f"{name}{divider}{act(found[name])}" for name in sorted(found)])

    cases = []
    for number in range(NUM_SHOWN + NUM_HIDDEN):
        text, key = table(rng), columns[number % 2]
        cases.append(Case(solve(text, key), args=("/work/in.csv", key), files=(("in.csv", text),)))
    files = {}
    for number, case in enumerate(cases[:NUM_SHOWN], 1):
        files[f"examples/{number}.csv"] = case.files[0][1]
        files[f"examples/{number}.{case.args[1]}.out"] = case.expected
    source = (
        "import csv\nimport sys\n\npath, key = sys.argv[1:]\nfound = {}\nfor row in csv.DictReader(open(path)):\n"
        "    found.setdefault(row[key], []).append(int(row['points']))\nfor name in sorted(found):\n"
        f"    print(f'{{name}}{divider}{{{function}(found[name])}}')\n"
    )
    return Job(
        "Write a Python program `report.py`, run as `python3 report.py FILE COLUMN`. FILE is a CSV file with the "
        "columns name, team, points; COLUMN is `name` or `team`. For each value of that column, in alphabetical order, "
        f"it prints the value, `{divider}`, and the {what} points of its rows, with nothing else. "
        "`examples` has files, and what is to be printed for a column.",
        files,
        (
            _written("report.py", source),
            "python3 report.py examples/1.csv name | diff - examples/1.name.out && echo same",
        ),
        (prints("report.py", ("python3",), cases[NUM_SHOWN:]),),
    )


def repair_script(rng: random.Random) -> Job:
    """A script with a mistake."""
    top = rng.randint(2, 4)
    kinds: list[tuple[str, Solve, str, str, str, Callable[[random.Random], str]]] = [
        (
            f"the {top} largest numbers of its input, the largest first",
            lambda text: lines(sorted(text.split(), key=int, reverse=True)[:top]),
            f"sort -r | head -{top}\n",
            "sort -r",
            "sort -rn",
            lambda rng: lines([str(rng.randint(1, 3000)) for _ in range(rng.randint(5, 15))]),
        ),
        (
            "how many different words its input has, whatever their case",
            lambda text: f"{len({word.lower() for word in text.split()})}\n",
            "tr 'A-Z' 'a-z' | tr -s ' ' '\\n' | uniq | wc -l\n",
            "uniq",
            "sort -u",
            lambda rng: " ".join(w.title() if rng.random() < 0.5 else w for w in sentence(rng, 30).split()) + "\n",
        ),
        (
            "each line of its input with its number in front, as `NUMBER: LINE`, counting only lines that are not "
            "empty, and without empty lines",
            lambda text: lines([f"{n}: {t}" for n, t in enumerate([t for t in text.splitlines() if t], 1)]),
            'awk \'$0 != "" {print NR ": " $0}\'\n',
            "print NR",
            "print ++n",
            lambda rng: lines([rng.choice(["", sentence(rng, 2)]) for _ in range(12)]),
        ),
        (
            f"the mean of the numbers of its input, rounded to {top} digits after the point",
            lambda text: f"{sum(map(int, text.split())) / len(text.split()):.{top}f}\n",
            f"awk '{{sum += $1}} END {{printf \"%.{top}f\\n\", sum / (NR + 1)}}'\n",
            "(NR + 1)",
            "NR",
            lambda rng: lines([str(rng.randint(-50, 90) * 8) for _ in range(2 ** rng.randint(1, 4))]),
        ),
    ]
    asked, solve, source, wrong, right, make = rng.choice(kinds)
    cases = _cases(rng, solve, make)
    return Job(
        f"`job.sh` is meant to print {asked}. It is run as `sh job.sh` and reads standard input. It has a mistake: the "
        "inputs and outputs in `examples` show what is right. Repair it.",
        {"job.sh": source, **_examples(cases)},
        ("cat job.sh", f"sed -i 's/{wrong}/{right}/' job.sh", _tried("sh job.sh")),
        (prints("job.sh", ("sh",), cases[NUM_SHOWN:]),),
    )


FAMILIES = (shell_filter, python_report, repair_script)
