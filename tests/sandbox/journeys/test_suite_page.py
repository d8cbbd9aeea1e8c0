"""The page of the safety suite is of this suite, and its run found nothing that got through."""

from __future__ import annotations

import re

import pytest
import report
from attacks import GROUPS
from hidden_memory import HIDDEN_MEMORY
from landlock_gaps import OPEN_ALONE
from machine_attacks import ALLOWED_INSIDE, NEIGHBOUR, OWN
from python_forgeries import FUNCTIONS, PROGRAMS


@pytest.fixture(scope="module")
def text() -> str:
    return report.PAGE.read_text(encoding="utf-8")


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the table below a heading."""
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


@pytest.mark.parametrize("title", [*GROUPS, report.MACHINE_GROUP, report.NEIGHBOUR_GROUP])
def test_the_page_lists_each_attack_under_its_name(text: str, title: str) -> None:
    groups = {**GROUPS, report.MACHINE_GROUP: OWN, report.NEIGHBOUR_GROUP: NEIGHBOUR}
    listed = [cells[1] for cells in rows(text, title)]
    assert listed == [attack.name for attack in groups[title]], "run `python tests/sandbox/report.py`"


def test_the_page_lists_each_hoard_and_each_forgery(text: str) -> None:
    assert [cells[0] for cells in rows(text, "Memory that no process's size shows")] == list(HIDDEN_MEMORY)
    assert [cells[0] for cells in rows(text, "Forged results")] == [*PROGRAMS, *FUNCTIONS]


def test_on_the_page_everything_was_contained_and_most_of_it_can_fail(text: str) -> None:
    assert "NOT CONTAINED" not in text
    assert "PASSED" not in text
    totals = re.findall(r"(\d+) of (\d+) contained", text)
    assert len(totals) == 4, "as root and as an ordinary user, tests and machines"
    assert all(contained == total for contained, total in totals)
    listed = [cells for title in GROUPS for cells in rows(text, title)]
    can_fail = [cells for cells in listed if cells[3] == "succeeds"]
    assert len(can_fail) >= 100


def test_where_an_attack_does_not_succeed_without_isolation_the_page_says_why(text: str) -> None:
    for title in (*GROUPS, report.MACHINE_GROUP):
        for cells in rows(text, title):
            for cell in cells[2:]:
                assert re.fullmatch(r"contained|succeeds|-|(stopped|not run|allowed): \S.*", cell), cells


def test_the_page_says_of_each_attack_what_becomes_of_it_without_namespaces(text: str) -> None:
    listed = rows(text, report.ALONE_GROUP)
    assert [cells[0] for cells in listed] == [attack.name for attacks in GROUPS.values() for attack in attacks]
    assert {cells[0] for cells in listed for cell in cells[1:] if cell != "contained"} == set(OPEN_ALONE)
    assert all(len(cells) == 3 for cells in listed), "by root and by an ordinary user"


def test_what_a_machine_is_allowed_is_among_the_attacks() -> None:
    names = {attack.name for attacks in GROUPS.values() for attack in attacks}
    assert set(ALLOWED_INSIDE) <= names
