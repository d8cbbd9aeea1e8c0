"""Jobs that change a folder of files: names, places, permissions, contents.

Each maker draws the folder as it is and computes the folder as it is to be. What must not be touched is a guard.
"""

from __future__ import annotations

import random

from shell_job import NOUNS, PEOPLE, Job, lines, sentence
from shell_leftovers import file_is, mode_is, names_are


def rename_by_rule(rng: random.Random) -> Job:
    """Names of one form into another."""
    prefix, ending = rng.choice(["IMG", "SCAN", "Photo"]), rng.choice(["JPEG", "PNG", "TIFF"])
    short = {"JPEG": "jpg", "PNG": "png", "TIFF": "tif"}[ending]
    before, after = {}, {}
    for number in rng.sample(range(1, 9999), rng.randint(8, 20)):
        day = f"{rng.randint(1, 28):02}{rng.randint(1, 12):02}{rng.randint(2015, 2025)}"
        text = f"{sentence(rng, 3)} {number}\n"
        before[f"{prefix}_{day}_{number}.{ending}"] = text
        after[f"{day[4:]}-{day[2:4]}-{day[:2]}_{number:04}.{short}"] = text
    kept = {f"{prefix.lower()}_{noun}.txt": sentence(rng, 3) + "\n" for noun in rng.sample(NOUNS, 2)}
    return Job(
        f"In `photos`, rename every file `{prefix}_DDMMYYYY_NUMBER.{ending}` to `YYYY-MM-DD_NNNN.{short}`, with the "
        "number written with at least four digits (zeros in front). Leave other files, and all contents, as they are.",
        {f"photos/{name}": text for name, text in (before | kept).items()},
        (
            "ls photos",
            f"cd photos && for f in {prefix}_*.{ending}; do b=${{f#{prefix}_}}; d=${{b%%_*}}; n=${{b#*_}}; "
            f'n=${{n%.{ending}}}; mv "$f" "$(echo $d | sed \'s/^\\(..\\)\\(..\\)\\(....\\)$/\\3-\\2-\\1/\')_$(printf '
            f"'%04d' $n).{short}\"; done; ls",
        ),
        (names_are("photos", [*after, *kept]), *(file_is(f"photos/{name}", text) for name, text in after.items())),
        tuple(file_is(f"photos/{name}", text) for name, text in kept.items()),
    )


def sort_into_folders(rng: random.Random) -> Job:
    """Files into folders by the owner that each of them names."""
    before, after = {}, {}
    owners = rng.sample(PEOPLE, rng.randint(3, 5))
    for number in range(rng.randint(12, 25)):
        owner, name = rng.choice(owners), f"{rng.choice(NOUNS)}{number}.txt"
        text = lines([f"title: {sentence(rng, 2)}", f"owner: {owner}", sentence(rng, rng.randint(2, 9))])
        before[f"inbox/{name}"] = text
        after[f"{owner}/{name}"] = text
    return Job(
        "Each file in `inbox` has a line `owner: NAME`. Move each file to `sorted/NAME/`, under the name it has, and "
        "leave `inbox` there but empty.",
        before,
        (
            'for f in inbox/*; do o=$(sed -n "s/^owner: //p" "$f"); mkdir -p "sorted/$o"; mv "$f" "sorted/$o/"; done; '
            "ls sorted inbox",
        ),
        (
            names_are("sorted", list(after)),
            *(file_is(f"sorted/{name}", text) for name, text in after.items()),
            names_are("inbox", []),
        ),
    )


def clean_up(rng: random.Random) -> Job:
    """Delete by ending, except where a mark says to keep."""
    endings = rng.sample([".tmp", ".bak", ".old", ".swp", ".orig"], 2)
    keeper = rng.choice([".keep", "KEEP", ".protected"])
    files = {}
    for folder in ["a", *rng.sample(NOUNS, 5)]:
        for number in range(rng.randint(3, 6)):
            files[f"tree/{folder}/{rng.choice(NOUNS)}{number}{rng.choice([*endings, '.txt'])}"] = (
                sentence(rng, 2) + "\n"
            )
    marked = rng.sample(sorted({path.split("/")[1] for path in files} - {"a"}), 2)
    files |= {f"tree/{folder}/{keeper}": "" for folder in marked}
    files[f"tree/a/must{endings[0]}"] = "gone\n"
    kept = [p for p in files if p.split("/")[1] in marked or not p.endswith(tuple(endings))]
    return Job(
        f"Below `tree`, delete every file whose name ends in `{endings[0]}` or `{endings[1]}`, except in folders that "
        f"hold a file `{keeper}`. Delete nothing else.",
        files,
        (
            f"find tree -type f \\( -name '*{endings[0]}' -o -name '*{endings[1]}' \\) | while read f; do "
            f'[ -e "$(dirname "$f")/{keeper}" ] || rm "$f"; done; find tree -type f | wc -l',
        ),
        (names_are("tree", [path.removeprefix("tree/") for path in kept]),),
        tuple(file_is(path, files[path]) for path in kept),
    )


def permissions(rng: random.Random) -> Job:
    """Modes by rule."""
    modes = {"scripts": rng.choice([0o755, 0o750, 0o700]), "keys": rng.choice([0o600, 0o400]), "keys folder": 0o700}
    scripts = [f"app/{noun}.sh" for noun in rng.sample(NOUNS, 4)]
    keys = [f"app/keys/{noun}.pem" for noun in rng.sample(NOUNS, 3)]
    other = [f"app/{noun}.txt" for noun in rng.sample(NOUNS, 3)]
    files = {path: f"{sentence(rng, 3)}\n" for path in (*scripts, *keys, *other)}
    return Job(
        f"Below `app`, give every file that ends in `.sh` the permissions {modes['scripts']:o}, every file in "
        f"`app/keys` {modes['keys']:o}, and the folder `app/keys` itself 700. All other files keep theirs.",
        files,
        (
            f"chmod {modes['scripts']:o} app/*.sh && chmod {modes['keys']:o} app/keys/* && chmod 700 app/keys",
            "ls -lR app",
        ),
        (
            *(mode_is(path, modes["scripts"]) for path in scripts),
            *(mode_is(path, modes["keys"]) for path in keys),
            mode_is("app/keys", 0o700),
        ),
        tuple(mode_is(path, 0o664) for path in other),
        prepare="chmod 777 app/keys && chmod 644 app/*.sh app/keys/* && chmod 664 app/*.txt",
    )


def replace_everywhere(rng: random.Random) -> Job:
    """Another name for something, but not in code that is not ours."""
    old, new = rng.sample(NOUNS, 2)
    old, new = f"get_{old}", f"load_{new}"
    ours, theirs = {}, {}
    for number in range(rng.randint(6, 12)):
        rows = [
            f"x{line} = {rng.choice([old, old, f'{old}_all', f'my_{old}', 'other'])}({line})"
            for line in range(rng.randint(2, 6))
        ]
        ours[f"src/{rng.choice(NOUNS)}{number}.py"] = lines([*rows, f"print({old}())"])
    for number in range(3):
        theirs[f"src/vendor/{rng.choice(NOUNS)}{number}.py"] = f"print({old}())\n"
    changed = {
        path: text.replace(f" {old}(", f" {new}(").replace(f"({old}(", f"({new}(") for path, text in ours.items()
    }
    return Job(
        f"In all `.py` files below `src`, rename the function `{old}` to `{new}`: whole names only (`{old}_all` and "
        f"`my_{old}` are others). Do not touch `src/vendor`.",
        ours | theirs,
        (
            f"find src -name '*.py' -not -path 'src/vendor/*' -exec sed -i 's/\\b{old}\\b/{new}/g' {{}} +",
            f"grep -rn '{new}' src | head -5",
        ),
        tuple(file_is(path, text) for path, text in changed.items()),
        tuple(file_is(path, text) for path, text in theirs.items()),
    )


FAMILIES = (rename_by_rule, sort_into_folders, clean_up, permissions, replace_everywhere)
