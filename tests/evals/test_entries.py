"""The list of evaluations: newest first, and a damaged one is one line of it."""

import os

from mettle.evals.entries import list_evaluations


def test_all_evaluations_are_listed_newest_first_even_a_damaged_one(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    old, new = saved([[1.0]], "old"), saved([[1.0]], "new", {"model": "n", "time_ms": 1500})
    os.utime(old / "metadata.json", (1, 1))
    beside = tmp_path / "environments" / "toy" / "outputs" / "evals" / "toy--m" / "broken"
    beside.mkdir(parents=True)
    (beside / "metadata.json").write_text("{")
    os.utime(beside / "metadata.json", (2, 2))
    found = list_evaluations()
    assert [entry.path.name for entry in found] == ["new", "broken", "old"]
    assert (found[0].model, found[0].time_s) == ("n", 1.5)
    assert "cannot be read" in (found[1].problem or "")
    assert found[1].env_id == "toy--m"
    assert new.name == "new"
