"""Figures by step follow the ledger."""

from mettle.hub.metrics import MetricTable
from mettle.storage.ledger import Ledger


def test_metrics_follow_new_steps_and_names(tmp_path):
    ledger = Ledger(tmp_path / "run.db")
    table = MetricTable(ledger.database)
    table.refresh()
    assert table.names == []
    ledger.journal.record_metrics(1, {"b": 1.0, "a": 2.0})
    table.refresh()
    ledger.journal.record_metrics(2, {"b": 3.0, "c": 4.0})
    ledger.journal.record_metrics(1, {"b": 1.5})
    table.refresh()
    assert table.columns == {"a": {1: 2.0}, "b": {1: 1.5, 2: 3.0}, "c": {2: 4.0}}
    assert table.newest(("missing", "b")) == 3.0
    ledger.close()
