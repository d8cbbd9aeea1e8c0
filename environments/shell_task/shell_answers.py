"""Jobs whose result is one file, `answer.txt`: looking for, counting, checking and taking apart what is there.

Each maker draws the files, computes what is right from what it drew, and gives commands that find it out.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import random
import tarfile
from collections import Counter

from shell_job import NOUNS, PEOPLE, Job, lines, sentence
from shell_leftovers import text_is

ANSWER = "answer.txt"


def count_files(rng: random.Random) -> Job:
    """Files by ending, size and content."""
    suffix, word, size = rng.choice([".log", ".txt", ".csv"]), rng.choice(NOUNS), rng.choice([150, 300, 450])
    files = {}
    for number in range(rng.randint(25, 45)):
        folders = rng.sample(NOUNS, rng.randint(0, 2))
        name = f"{rng.choice(NOUNS)}{number}{rng.choice([suffix, suffix, '.md', '.dat'])}"
        told = [word] if rng.random() < 0.5 else [f"{word}s"]
        text = [*sentence(rng, rng.randint(5, 120)).replace(word, "plain").split(), *told]
        rng.shuffle(text)
        files["/".join(["data", *folders, name])] = " ".join(text) + "\n"
    fits = [
        path for path, text in files.items()
        if path.endswith(suffix) and len(text) > size and word in text.split()
    ]  # fmt: skip
    return Job(
        f"Count the files at any depth below `data` whose name ends in `{suffix}`, which are larger than {size} bytes, "
        f"and which contain the whole word `{word}` (`{word}s` is another word). Write the number to `{ANSWER}`.",
        files,
        (f"find data -type f -name '*{suffix}' -size +{size}c -exec grep -lw '{word}' {{}} + | wc -l > {ANSWER}",),
        (text_is(ANSWER, str(len(fits))),),
    )


def find_files(rng: random.Random) -> Job:
    """Files that hold a setting with a value."""
    key, value = rng.choice(["owner", "region", "tier"]), rng.choice(NOUNS)
    files, fits = {}, []
    for number in range(rng.randint(20, 40)):
        path = "/".join(["services", *rng.sample(NOUNS, rng.randint(1, 3)), f"unit{number}.conf"])
        given = value if rng.random() < 0.2 or number == 0 else rng.choice([f"{value}2", "none", f"old-{value}"])
        rows = [f"{key}={given}", f"port={rng.randint(1000, 9000)}", f"note={value} {key}"]
        rng.shuffle(rows)
        files[path] = lines(rows)
        fits += [path] if given == value else []
    return Job(
        f"Find every file below `services` that has a line which is exactly `{key}={value}`. Write their paths, from "
        f"`services/` on, one a line and sorted alphabetically (byte by byte), to `{ANSWER}`.",
        files,
        (f"grep -rlx '{key}={value}' services | LC_ALL=C sort > {ANSWER}", f"head -3 {ANSWER}"),
        (text_is(ANSWER, lines(sorted(fits))),),
    )


def _access_log(rng: random.Random) -> list[tuple[str, str, str, int, int]]:
    hosts = [f"10.{rng.randint(0, 9)}.{rng.randint(0, 99)}.{rng.randint(1, 250)}" for _ in range(12)]
    pages = [f"/{noun}" for noun in rng.sample(NOUNS, 8)]
    statuses = [200, 200, 200, 301, 404, 404, 500, 503]
    return [
        (rng.choice(hosts), rng.choice(["GET", "POST"]), rng.choice(pages), rng.choice(statuses), rng.randint(90, 9000))
        for _ in range(rng.randint(150, 400))
    ]


def _logged(rows: list[tuple[str, str, str, int, int]]) -> str:
    return lines([f'{host} - - "{verb} {page} HTTP/1.1" {status} {size}' for host, verb, page, status, size in rows])


def log_ranking(rng: random.Random) -> Job:
    """Who has most of the requests of one status."""
    rows, status, most = _access_log(rng), rng.choice([404, 500, 503]), rng.randint(2, 4)
    counts = Counter(row[0] for row in rows if row[3] == status)
    ranked = sorted(counts, key=lambda host: (-counts[host], host))[:most]
    return Job(
        f"`access.log` has one request a line: address, two dashes, the quoted request, status, bytes. Which {most} "
        f"addresses have the most requests with status {status}? Write them to `{ANSWER}`, one a line as `ADDRESS "
        "COUNT`, the largest count first; equal counts in the order of their addresses as text (byte by byte).",
        {"access.log": _logged(rows)},
        (
            "head -2 access.log",
            f"awk '$(NF-1) == {status} {{n[$1]++}} END {{for (a in n) print a, n[a]}}' access.log "
            f"| LC_ALL=C sort -k2,2nr -k1,1 | head -{most} > {ANSWER}",
        ),
        (text_is(ANSWER, lines([f"{host} {counts[host]}" for host in ranked])),),
    )


def log_totals(rng: random.Random) -> Job:
    """Bytes by page for one kind of request."""
    rows, verb = _access_log(rng), rng.choice(["GET", "POST"])
    totals: Counter[str] = Counter()
    for _, said, page, status, size in rows:
        if said == verb and status == 200:
            totals[page] += size
    return Job(
        "`access.log` has one request a line: address, two dashes, the quoted request (method, page, version), status, "
        f"bytes. For each page, add up the bytes of the {verb} requests with status 200. Write `PAGE TOTAL` lines to "
        f"`{ANSWER}`, sorted by page; leave out pages without such a request.",
        {"access.log": _logged(rows)},
        (
            f"""awk '$4 == "\\"{verb}" && $(NF-1) == 200 {{n[$5] += $NF}} END {{for (p in n) print p, n[p]}}' """
            f"access.log | LC_ALL=C sort > {ANSWER}",
            f"cat {ANSWER}",
        ),
        (text_is(ANSWER, lines([f"{page} {totals[page]}" for page in sorted(totals)])),),
    )


def checksums(rng: random.Random) -> Job:
    """Files that are not what their checksums say."""
    kind = rng.choice(["sha256", "sha1", "md5"])
    files: dict[str, str | bytes] = {}
    listed, wrong = [], []
    for number in range(rng.randint(12, 25)):
        path = f"parts/{rng.choice(NOUNS)}{number}.bin"
        data = rng.randbytes(rng.randint(40, 400))
        listed.append(f"{hashlib.new(kind, data).hexdigest()}  {path}")
        if rng.random() < 0.25 or number == 3:
            at = rng.randrange(len(data))
            data = data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
            wrong.append(path)
        files[path] = data
    files[f"{kind.upper()}SUMS"] = lines(listed)
    return Job(
        f"`{kind.upper()}SUMS` lists the {kind} checksums that the files of `parts` should have. Some files were "
        f"damaged. Write the paths of the damaged ones to `{ANSWER}`, one a line, in any order.",
        files,
        (f"{kind}sum -c {kind.upper()}SUMS 2>/dev/null | sed -n 's/: FAILED$//p' > {ANSWER}", f"cat {ANSWER}"),
        (text_is(ANSWER, lines(wrong), in_any_order=True),),
    )


def nested_archive(rng: random.Random) -> Job:
    """Archives in archives, one of them as text."""
    secret = f"{rng.choice(NOUNS)}-{rng.randint(1000, 9999)}"
    inner_name, file_name = f"{rng.choice(NOUNS)}.tar.gz", f"{rng.choice(NOUNS)}.txt"
    inner = _tar_gz({f"deep/{file_name}": f"{secret}\n".encode(), "deep/readme": b"not here\n"})
    outer = _tar_gz({inner_name: inner, **{f"{n}.txt": f"{n}\n".encode() for n in rng.sample(NOUNS, 3)}})
    packed = base64.encodebytes(outer).decode()
    return Job(
        "`parcel.b64` is a .tar.gz archive written as base64. In it is another .tar.gz archive, and in that one a file "
        f"`{file_name}`. Write what that file says to `{ANSWER}`.",
        {"parcel.b64": packed},
        (
            "mkdir -p /tmp/out && base64 -d parcel.b64 | tar -xz -C /tmp/out && ls /tmp/out",
            f"cd /tmp/out && tar -xzf {inner_name} && find . -name '{file_name}'",
            f"cat /tmp/out/deep/{file_name} > {ANSWER}",
        ),
        (text_is(ANSWER, secret),),
    )


def _tar_gz(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as squeezed,
        tarfile.open(fileobj=squeezed, mode="w") as archive,
    ):
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def decode_chain(rng: random.Random) -> Job:
    """A text under several codes, the outermost named first."""
    secret = sentence(rng, 4)
    coded = secret
    steps: list[str] = []
    commands: list[str] = []
    for _ in range(rng.randint(2, 4)):
        kind = rng.choice([one for one in ("hex", "base64", "reversed") if not steps or one != steps[-1]])
        if kind == "hex":
            coded, command = coded.encode().hex(), "python3 -c 'print(bytes.fromhex(input()).decode())'"
        elif kind == "base64":
            coded, command = base64.b64encode(coded.encode()).decode(), "base64 -d"
        else:
            coded, command = coded[::-1], "rev"
        steps.append(kind)
        commands.append(command)
    undo = " | ".join(reversed(commands)).replace("rev", "python3 -c 'print(input()[::-1])'")
    undo = undo.replace("base64 -d", "base64 -d | sed '$a\\'")
    return Job(
        f"The line in `secret.txt` was made from a text by these steps, one after the other: {', '.join(steps)}. "
        f"(`hex` and `base64` encode, `reversed` writes backwards.) Undo them and write the text to `{ANSWER}`.",
        {"secret.txt": f"{coded}\n"},
        (f"cat secret.txt | {undo} > {ANSWER}", f"cat {ANSWER}"),
        (text_is(ANSWER, secret),),
    )


def first_bad(rng: random.Random) -> Job:
    """The change that broke something, in a history of folders."""
    num, factor = rng.randint(20, 60), rng.randint(3, 9)
    bad = rng.randint(2, num)
    files = {}
    for number in range(1, num + 1):
        broken = f" - (x > {factor * 4})" if number >= bad else ""
        files[f"history/r{number:03}/price.sh"] = (
            f"#!/bin/sh\n# revision {number} by {rng.choice(PEOPLE)}: {sentence(rng, 3)}\nx=$1\n"
            f"echo $(( x * {factor}{broken} + {number % 7} - {number % 7} ))\n"
        )
    at = factor * 4 + rng.randint(1, 9)
    files["check.sh"] = (
        f'#!/bin/sh\n# usage: sh check.sh REVISION\n[ "$(sh history/$1/price.sh {at})" = {at * factor} ]\n'
    )
    return Job(
        "`history` has the revisions of a program, `r001` and so on, in order. `sh check.sh REVISION` ends with exit "
        "code 0 for a good one and 1 for a bad one; once bad, later ones stay bad. Write the name of the first bad "
        f"revision to `{ANSWER}`.",
        files,
        (
            "cat check.sh; ls history | wc -l",
            f"low=1; high={num}; while [ $low -lt $high ]; do mid=$(( (low + high) / 2 )); "
            "if sh check.sh $(printf 'r%03d' $mid); then low=$((mid + 1)); else high=$mid; fi; done; "
            f"printf 'r%03d\\n' $low > {ANSWER}; cat {ANSWER}",
        ),
        (text_is(ANSWER, f"r{bad:03}"),),
    )


FAMILIES = (
    count_files, find_files, log_ranking, log_totals, checksums, nested_archive, decode_chain, first_bad,
)  # fmt: skip
