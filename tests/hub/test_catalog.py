"""The list of runs: its order is that of writing, whoever looks; and what was seen once is not opened again."""

from __future__ import annotations

import os

import pytest

from mettle.hub.catalog import RunCatalog
from mettle.hub.reader import RunReader
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir


@pytest.fixture
def folder(tmp_path):
    """Six finished runs, written one day after the other, and a folder of the workspace around them."""
    for number in range(6):
        run = RunDir(tmp_path / "runs" / f"run-{number}")
        ledger = Ledger(run.ledger)
        ledger.journal.set_fact("state", "finished")
        ledger.close()
        at = 1_700_000_000 + 86_400 * number
        for path in (run.ledger, run.path):
            os.utime(path, (at, at))
    return tmp_path


NEWEST_FIRST = [f"run-{number}" for number in (5, 4, 3, 2, 1, 0)]


@pytest.fixture
def opened(monkeypatch):
    """The runs that were opened, in order."""
    names, begin = [], RunReader.__init__

    def note(self, run_dir, **more):
        names.append(run_dir.name)
        begin(self, run_dir, **more)

    monkeypatch.setattr(RunReader, "__init__", note)
    return names


def test_a_look_at_a_run_is_no_writing(folder):
    """Whoever reads a ledger leaves an empty log beside it."""
    catalog = RunCatalog(folder / "runs", workspace=folder)
    assert catalog.names() == NEWEST_FIRST
    for name in ("run-0", "run-3"):
        reader = catalog.open(name)
        reader.refresh()
        assert reader.quiet_s > 86_400
    assert (folder / "runs" / "run-0" / "run.db-wal").exists()
    assert RunCatalog(folder / "runs", workspace=folder).names() == NEWEST_FIRST


def test_pages_open_only_what_they_have_not_seen(folder, opened):
    catalog = RunCatalog(folder / "runs", workspace=folder)
    for _ in range(3):
        shown = [card.name for number in (1, 2, 3) for card in catalog.page_of_cards(number, 2)[0]]
        assert sorted(shown) == sorted(NEWEST_FIRST)
    assert sorted(opened) == sorted(NEWEST_FIRST)
    ledger = Ledger(RunDir(folder / "runs" / "run-2").ledger)
    ledger.journal.set_fact("state", "failed")
    ledger.close()
    assert catalog.names()[0] == "run-2"
    assert catalog.page_of_cards(1, 2)[0][0].state == "failed"


def test_after_the_warm_up_a_page_opens_nothing(folder, opened):
    catalog = RunCatalog(folder / "runs", workspace=folder)
    catalog.warm_up(lambda: False)
    assert opened == NEWEST_FIRST
    assert len(catalog.page_of_cards(3, 2)[0]) == 2
    assert opened == NEWEST_FIRST


def test_a_warm_up_ends_when_the_server_does(folder, opened):
    left = iter([False] * 8 + [True] * 8)
    catalog = RunCatalog(folder / "runs", workspace=folder)
    catalog.warm_up(lambda: next(left))
    assert opened == NEWEST_FIRST[:2]
    assert len(catalog.names()) == 6
