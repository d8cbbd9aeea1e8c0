"""Jobs over data: settings to repair, tables to clean, join and sort.

What a file means is what counts, where it is a format with a parser; else its lines.
"""

from __future__ import annotations

import configparser
import csv
import io
import json
import random
from collections import defaultdict
from typing import Any

from shell_job import NOUNS, PEOPLE, Job, lines
from shell_leftovers import file_is, json_is, parses_to, text_is


def repair_json(rng: random.Random) -> Job:
    """A settings file that does not parse, and one setting to change."""
    sections = rng.sample(NOUNS, 3)
    value: dict[str, Any] = {
        section: {
            "port": rng.randint(1000, 9999),
            "host": f"{rng.choice(NOUNS)}.local",
            "is_on": rng.random() < 0.5,
            "tags": rng.sample(NOUNS, 3),
        }
        for section in sections
    }
    text = json.dumps(value, indent=2)
    flaw = rng.choice(["comma", "comment", "quote", "brace"])
    if flaw == "comma":
        text, repair = text.replace("\n    ]", ",\n    ]"), "s/,(\\s*[\\]}])/\\1/g"
    elif flaw == "comment":
        text, repair = text.replace('"port"', '// the port\n    "port"'), "s/^\\s*\\/\\/.*$//"
    elif flaw == "quote":
        text, repair = text.replace('"port"', "port"), 's/^(\\s*)port:/\\1"port":/'
    else:
        text, repair = text.rstrip().removesuffix("}"), "$a}"
    port = rng.randint(10000, 20000)
    value[sections[1]]["port"] = port
    cured = (
        'python3 -c \'import re; t = open("settings.json").read(); '
        'open("settings.json", "w").write(re.sub(r",(\\s*[\\]}])", r"\\1", t))\''
        if flaw == "comma"
        else f"sed -E -i '{repair}' settings.json"
    )
    setting = (
        "import json; v = json.load(open('settings.json')); "
        f"v['{sections[1]}']['port'] = {port}; json.dump(v, open('settings.json', 'w'), indent=2)"
    )
    return Job(
        "`settings.json` is no valid JSON any more. Repair it without changing what it means to say, and set the "
        f"`port` of `{sections[1]}` to {port}.",
        {"settings.json": text + "\n"},
        ("cat settings.json", cured, f'python3 -c "{setting}" && cat settings.json'),
        (json_is("settings.json", value),),
    )


def edit_ini(rng: random.Random) -> Job:
    """Settings to change, to add and to drop in an INI file."""
    sections = rng.sample(NOUNS, 4)
    keys = ("timeout", "retries", "size", "debug")
    table = {section: {key: str(rng.randint(1, 99)) for key in keys} for section in sections}
    text = "".join(
        f"# {section}\n[{section}]\n" + lines([f"{key} = {value}" for key, value in keys.items()]) + "\n"
        for section, keys in table.items()
    )
    changed, added, dropped = rng.sample(sections, 3)
    number = rng.randint(100, 999)
    table[changed]["timeout"] = str(number)
    table[added]["owner"] = rng.choice(PEOPLE)
    del table[dropped]["debug"]
    return Job(
        f"In `service.ini`, set `timeout` of section `[{changed}]` to {number}, add `owner = {table[added]['owner']}` "
        f"to section `[{added}]`, and remove `debug` from section `[{dropped}]`. Keep everything else.",
        {"service.ini": text},
        (
            "cat service.ini",
            f"sed -i -e '/^\\[{changed}\\]/,/^$/ s/^timeout = .*/timeout = {number}/' "
            f"-e '/^\\[{added}\\]/a owner = {table[added]['owner']}' "
            f"-e '/^\\[{dropped}\\]/,/^$/ {{/^debug = /d}}' service.ini",
        ),
        (parses_to("service.ini", _ini, table),),
    )


def _ini(text: str) -> dict[str, dict[str, str]]:
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(text)
    except configparser.Error as error:
        raise ValueError(str(error)) from error
    return {section: dict(parser[section]) for section in parser.sections()}


def clean_csv(rng: random.Random) -> Job:
    """A table with another separator, gaps, and space where none belongs."""
    separator = rng.choice([";", "|"])
    most = rng.randint(40, 60)
    dirty, clean = [["name", "age", "city"]], [["name", "age", "city"]]
    for _ in range(rng.randint(12, 30)):
        row = [rng.choice(PEOPLE), str(rng.randint(18, 80)), rng.choice(NOUNS)]
        is_gap = rng.random() < 0.2
        if is_gap:
            row[rng.randrange(3)] = ""
        dirty.append([rng.choice(["", " "]) + cell + rng.choice(["", "  "]) for cell in row])
        if not is_gap and int(row[1]) <= most:
            clean.append(row)
    return Job(
        f"`people.csv` separates its columns by `{separator}` and has stray spaces around values. Write `clean.csv` "
        "with commas instead, the same header, no spaces around values, and without the rows in which a value is "
        f"missing or `age` is over {most}. Keep the order.",
        {"people.csv": lines([separator.join(row) for row in dirty])},
        (
            "head -4 people.csv",
            f"awk -F'[{separator}]' -v OFS=, '{{for (i = 1; i <= NF; i++) gsub(/^ +| +$/, \"\", $i)}} "
            f'NR == 1 || ($1 != "" && $2 != "" && $3 != "" && $2 <= {most}) {{print $1, $2, $3}}\' people.csv '
            "> clean.csv",
        ),
        (parses_to("clean.csv", lambda text: [row for row in csv.reader(io.StringIO(text)) if row], clean),),
    )


def join_totals(rng: random.Random) -> Job:
    """Two tables joined by a key, and a total for each group."""
    customers = {f"c{number:02}": rng.choice(NOUNS) for number in range(1, rng.randint(6, 10))}
    orders = [(rng.choice([*customers, "c99"]), rng.randint(5, 500)) for _ in range(rng.randint(30, 80))]
    totals: dict[str, int] = defaultdict(int)
    for customer, amount in orders:
        if customer in customers:
            totals[customers[customer]] += amount
    shown = [f"{city},{total}" for city, total in sorted(totals.items(), key=lambda item: (-item[1], item[0]))]
    return Job(
        "`customers.csv` has `id,city`, `orders.csv` has `id,customer,amount`. Add up the amounts by city of the "
        "customer, leaving out orders of unknown customers. Write `totals.csv` with the header `city,total`, the "
        "largest total first; equal ones by city.",
        {
            "customers.csv": lines(["id,city", *(f"{key},{city}" for key, city in customers.items())]),
            "orders.csv": lines(["id,customer,amount", *(f"{n},{c},{a}" for n, (c, a) in enumerate(orders))]),
        },
        (
            "head -2 customers.csv orders.csv",
            "(echo city,total; awk -F, 'FNR == 1 {next} NR == FNR {city[$1] = $2; next} $2 in city "
            '{sum[city[$2]] += $3} END {for (c in sum) print c "," sum[c]}\' customers.csv orders.csv '
            "| LC_ALL=C sort -t, -k2,2nr -k1,1) > totals.csv",
        ),
        (text_is("totals.csv", lines(["city,total", *shown])),),
    )


def merge_lists(rng: random.Random) -> Job:
    """Lists merged, without what a third list has, sorted by number."""
    parts = {f"list{number}.txt": rng.choices(range(1, 400), k=rng.randint(20, 60)) for number in range(1, 4)}
    blocked = rng.sample(range(1, 400), 60)
    down = rng.random() < 0.5
    kept = sorted({n for part in parts.values() for n in part} - set(blocked), reverse=down)
    order = "from the largest to the smallest" if down else "from the smallest to the largest"
    return Job(
        "`list1.txt`, `list2.txt` and `list3.txt` have a number a line. Write to `merged.txt` the numbers that are in "
        f"any of them but not in `blocked.txt`, each once, {order} (as numbers).",
        {
            **{name: lines([str(n) for n in part]) for name, part in parts.items()},
            "blocked.txt": lines([str(n) for n in blocked]),
        },
        (f"cat list?.txt | grep -vxFf blocked.txt | sort -n -u {'-r' if down else ''} > merged.txt; wc -l merged.txt",),
        (text_is("merged.txt", lines([str(n) for n in kept])),),
    )


def json_to_table(rng: random.Random) -> Job:
    """Records of JSON lines, filtered and flattened into a table."""
    rows: list[dict[str, Any]] = [
        {"id": number, "user": {"name": rng.choice(PEOPLE), "level": rng.randint(1, 5)}, "score": rng.randint(0, 100)}
        for number in rng.sample(range(1, 500), rng.randint(15, 40))
    ]
    level = rng.randint(2, 4)
    kept = sorted((row for row in rows if row["user"]["level"] >= level), key=lambda row: row["id"])
    table = ["id\tname\tscore", *(f"{r['id']}\t{r['user']['name']}\t{r['score']}" for r in kept)]
    program = (
        "import json; rows = [json.loads(line) for line in open('events.jsonl')]; "
        f"rows = sorted((r for r in rows if r['user']['level'] >= {level}), key=lambda r: r['id']); "
        "print('id', 'name', 'score', sep='\\t'); "
        "[print(r['id'], r['user']['name'], r['score'], sep='\\t') for r in rows]"
    )
    return Job(
        f"`events.jsonl` has one JSON object a line. Take those whose `user.level` is at least {level} and write "
        "`events.tsv`: the columns `id`, `name` (of the user) and `score`, separated by tabs, with a header line, "
        "sorted by `id` as a number.",
        {"events.jsonl": lines([json.dumps(row) for row in rows])},
        ("head -2 events.jsonl", f'python3 -c "{program}" > events.tsv'),
        (text_is("events.tsv", lines(table)),),
    )


def start_order(rng: random.Random) -> Job:
    """Services in an order in which each comes after what it needs."""
    services = rng.sample(NOUNS, rng.randint(6, 12))
    needs = {
        service: sorted(rng.sample(services[:at], rng.randint(0, min(at, 3)))) for at, service in enumerate(services)
    }
    listed = sorted(needs)
    files = {f"units/{name}.unit": lines([f"name={name}", f"needs={' '.join(needs[name])}"]) for name in listed}

    def is_order(text: str) -> bool:
        said = text.split()
        at = {service: place for place, service in enumerate(said)}
        return sorted(said) == listed and all(at[need] < at[name] for name in listed for need in needs[name])

    return Job(
        "Each file in `units` names a service and the services that it needs. Write all services to `order.txt`, one a "
        "line, so that each comes after those that it needs. Change nothing in `units`.",
        files,
        (
            "cat units/*",
            "for f in units/*.unit; do n=$(sed -n 's/^name=//p' $f); echo $n $n; for d in $(sed -n 's/^needs=//p' $f); "
            "do echo $d $n; done; done | tsort > order.txt; cat order.txt",
        ),
        (parses_to("order.txt", is_order, True),),
        tuple(file_is(path, text) for path, text in files.items()),
    )


FAMILIES = (repair_json, edit_ini, clean_csv, join_totals, merge_lists, json_to_table, start_order)
