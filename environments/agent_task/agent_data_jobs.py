"""Jobs with data: records that do not keep the rules of a project, to be written anew as they should be.

Parts: `contacts`, `readings`, `invoices`. Each maker draws the records, and works out in Python what the rules make of
them; the shown solution is a program that does the same.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

from agent_job import Draft, Job, Step

NAMES = ("ada", "ben", "cleo", "dora", "emil", "fay", "gus", "hana", "ivo", "june")
TOLD = (
    "`records.jsonl` has one record a line, and `RULES.md` says how records have to be. Apply the rules, in their "
    "order, and write the records to `fixed.json`, as one JSON list."
)
Rows = list[dict[str, Any]]


def _job(rules: list[str], rows: Rows, program: str) -> Draft:
    """A job whose result is what `program`, which is this package's own, makes of the rows."""
    made: dict[str, Any] = {"rows": json.loads(json.dumps(rows))}
    exec(program, made)
    source = (
        'import json\n\nwith open("records.jsonl") as file:\n    rows = [json.loads(line) for line in file]\n'
        f'{program}with open("fixed.json", "w") as file:\n    json.dump(rows, file, indent=1)\n'
    )
    listed = "\n".join(f"{number}. {rule}" for number, rule in enumerate(rules, 1))
    job = Job(
        {"records.jsonl": "".join(json.dumps(row) + "\n" for row in rows), "RULES.md": f"# Rules\n\n{listed}\n"},
        (
            Step("run", {"command": "cat RULES.md; head -3 records.jsonl"}),
            Step("write_file", {"path": "fix.py", "content": source}),
            Step("run", {"command": "python3 fix.py && head -c 300 fixed.json"}),
        ),
        results={"fixed.json": made["rows"]},
    )
    return Draft(TOLD, lambda: job)


def contacts(rng: random.Random) -> Draft:
    """People: addresses, telephone numbers, doubles."""
    code, kept = rng.choice(["+49", "+31", "+47"]), rng.choice(["first", "last"])
    rows: Rows = []
    for _ in range(rng.randint(8, 20)):
        name = rng.choice(NAMES)
        digits = "".join(rng.choices("0123456789", k=8))
        phone = rng.choice([f"0{digits}", f"{code} {digits[:3]} {digits[3:]}", f"0{digits[:4]}-{digits[4:]}"])
        address = rng.choice([f"{name}@mail.example", f" {name.title()}@Mail.example", f"{name}@post.example "])
        rows.append(
            {"email": address, "phone": phone, "age": rng.choice([rng.randint(18, 80), str(rng.randint(18, 80))])}
        )
    rules = [
        "`email` is in small letters and has no space around it.",
        f"`phone` has no spaces and no hyphens, and a leading `0` is replaced by `{code}`.",
        "`age` is a number.",
        f"Of records with the same `email`, only the {kept} one is kept. The order of those that are kept stays.",
    ]
    way = "" if kept == "first" else "[::-1]"
    program = (
        'for row in rows:\n    row["email"] = row["email"].strip().lower()\n'
        '    phone = row["phone"].replace(" ", "").replace("-", "")\n'
        f'    row["phone"] = "{code}" + phone[1:] if phone.startswith("0") else phone\n'
        '    row["age"] = int(row["age"])\n'
        f'unique = {{}}\nfor row in rows{way}:\n    unique.setdefault(row["email"], row)\n'
        f"rows = list(unique.values()){way}\n"
    )
    return _job(rules, rows, program)


def readings(rng: random.Random) -> Draft:
    """Measurements: units, gaps, order."""
    low, high = rng.randint(-30, -10), rng.randint(40, 60)
    rows: Rows = []
    for at in rng.sample(range(1000), rng.randint(10, 25)):
        celsius = rng.randint(low - 10, high + 10)
        value: Mapping[str, Any] = rng.choice(
            [{"celsius": celsius}, {"celsius": celsius}, {"kelvin": celsius + 273}, {"celsius": None}]
        )
        rows.append({"at": at, **value})
    rules = [
        "A record with `kelvin` gets `celsius` instead: kelvin minus 273.",
        f"Records whose `celsius` is below {low} or above {high} are left out.",
        "Records are sorted by `at`.",
        "A `celsius` that is null becomes that of the record before it. Records before the first known one are left "
        "out.",
    ]
    program = (
        'for row in rows:\n    if "kelvin" in row:\n        row["celsius"] = row.pop("kelvin") - 273\n'
        f'rows = [row for row in rows if row["celsius"] is None or {low} <= row["celsius"] <= {high}]\n'
        'rows = sorted(rows, key=lambda row: row["at"])\nlast = None\nfor row in rows:\n'
        '    last = row["celsius"] = last if row["celsius"] is None else row["celsius"]\n'
        'rows = [row for row in rows if row["celsius"] is not None]\n'
    )
    return _job(rules, rows, program)


def invoices(rng: random.Random) -> Draft:
    """Invoices: totals, discounts, numbers."""
    least, percent = rng.choice([100, 200, 300]), rng.choice([5, 10, 20])
    rows: Rows = [
        {
            "number": f"{rng.choice(['A', 'B'])}{number}",
            "lines": [[rng.randint(1, 9), rng.randint(1, 60)] for _ in range(rng.randint(1, 4))],
            "total": rng.randint(1, 400),
        }
        for number in rng.sample(range(1, 2000), rng.randint(8, 20))
    ]
    rules = [
        "`total` is the sum, over `lines`, of the count times the price (a line is [count, price]).",
        f"If that is at least {least}, the whole-number part of {percent} percent of it is taken off.",
        "`number` has a hyphen after its letter and four digits after that: `A7` becomes `A-0007`.",
        "`lines` is left out, and the records are sorted by `number`.",
    ]
    program = (
        "fixed = []\nfor row in rows:\n    total = sum(count * price for count, price in row['lines'])\n"
        f"    if total >= {least}:\n        total -= total * {percent} // 100\n"
        "    number = f\"{row['number'][0]}-{int(row['number'][1:]):04}\"\n"
        '    fixed.append({"number": number, "total": total})\nrows = sorted(fixed, key=lambda row: row["number"])\n'
    )
    return _job(rules, rows, program)
