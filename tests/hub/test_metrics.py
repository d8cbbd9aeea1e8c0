"""Figures by step follow the ledger; of very many, a page is sent those that it can show."""

import json

from hypothesis import given
from hypothesis import strategies as st

from mettle.hub.metrics import LEAST_STEPS, MetricTable, thin
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


def test_few_steps_stay_as_they_are():
    steps, columns = list(range(40)), {"a": [float(i) for i in range(40)]}
    assert thin(steps, columns, most_values=10) == (steps, columns), "never fewer than so many steps"
    assert thin(steps, columns) == (steps, columns)


@given(
    st.lists(st.none() | st.floats(-1e6, 1e6), min_size=LEAST_STEPS + 1, max_size=400),
    st.integers(1, 3), st.integers(1, 900),
)  # fmt: skip
def test_thinned_columns_keep_extremes_order_and_the_newest(values, num_columns, most):
    steps = list(range(0, 3 * len(values), 3))
    columns = {f"c{i}": values[i:] + values[:i] for i in range(num_columns)}
    few, thinned = thin(steps, columns, most_values=most)
    assert len(few) <= max(LEAST_STEPS, most // (num_columns + 1))
    assert few == sorted(set(few))
    assert set(few) <= set(steps)
    assert few[-1] == steps[-1]
    newest = max(LEAST_STEPS, most // (num_columns + 1)) // 4
    for name, column in columns.items():
        known, kept = [[v for v in each if v is not None] for each in (column, thinned[name])]
        assert len(thinned[name]) == len(few)
        assert set(kept) <= set(known)
        assert not known or (min(kept), max(kept)) == (min(known), max(known))
        assert thinned[name][-newest:] == column[-newest:]


def test_a_spike_stands_within_a_bucket_of_its_place():
    steps, column = list(range(10_000)), [0.0] * 10_000
    column[4321] = 9.0
    few, thinned = thin(steps, {"a": column}, most_values=500)
    (at,) = [step for step, value in zip(few, thinned["a"], strict=True) if value == 9.0]
    assert abs(at - 4321) <= 10_000 / (500 * 3 / 8)


def test_what_a_page_of_a_long_run_is_sent_is_small():
    steps = list(range(100_000))
    columns = {f"metric/{i}": [-123.456 - step % 977 for step in steps] for i in range(3)}
    assert len(json.dumps(thin(steps, columns), separators=(",", ":"))) < 50_000
