"""What a job is: words, files to begin with, what must hold at the end, and commands that do it.

Parts: `Job`, `Program`, and the words that jobs are dressed in. Invariants: a job is made again from its family and its
seed, so a row holds no expected result; a goal does not hold before something was done, and a guard does; what is
expected is computed here and never enters the machine.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from shell_leftovers import Check

NOUNS = (
    "amber", "anchor", "basin", "beacon", "birch", "bridge", "canyon", "cedar", "cinder", "clover", "comet", "coral",
    "crane", "delta", "ember", "fable", "falcon", "fjord", "garnet", "glacier", "harbor", "hazel", "heron", "island",
    "jasper", "juniper", "kettle", "lagoon", "lantern", "linden", "maple", "marble", "meadow", "mirror", "nickel",
    "orchid", "otter", "pebble", "pepper", "pilot", "prairie", "quartz", "raven", "ribbon", "saddle", "salmon",
    "spruce", "summit", "thistle", "timber", "tulip", "tundra", "velvet", "violet", "walnut", "willow", "winter",
)  # fmt: skip
PEOPLE = ("ada", "ben", "cleo", "dora", "emil", "fay", "gus", "hana", "ivo", "june", "kai", "lena", "milo", "nora")


@dataclass(frozen=True)
class Program:
    """A process of the machine that is not the model's: a command, and what it is fed."""

    argv: tuple[str, ...]
    stdin: bytes | None = None
    port: int | None = None
    """Where it is to be reached before the model begins."""
    file: str | None = None
    """What it has opened before the model begins."""


@dataclass(frozen=True)
class Job:
    """One thing to do in a folder."""

    question: str
    files: Mapping[str, str | bytes]
    solution: tuple[str, ...]
    goals: tuple[Check, ...]
    guards: tuple[Check, ...] = ()
    prepare: str = ""
    """A command that is run in the folder before the model begins."""
    programs: Mapping[str, Program] = field(default_factory=dict)


def sentence(rng: random.Random, num_words: int) -> str:
    """Words in a row."""
    return " ".join(rng.choices(NOUNS, k=num_words))


def lines(rows: list[str]) -> str:
    """Text of these lines."""
    return "".join(f"{row}\n" for row in rows)
