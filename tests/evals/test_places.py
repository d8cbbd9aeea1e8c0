"""Evaluations are found where they were put."""

from __future__ import annotations

import shutil

from mettle.evals.entries import find_evaluations
from mettle.evals.places import is_collection, remember_place


def test_a_folder_that_was_chosen_is_looked_into(saved, tmp_path):
    path = saved([[1.0]])
    chosen = tmp_path / "elsewhere"
    shutil.copytree(path.parents[1], chosen)
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    assert find_evaluations(workspace) == []
    remember_place(chosen, workspace)
    remember_place(chosen, workspace)
    assert find_evaluations(workspace) == [chosen / "toy--m" / "a"]
    assert (workspace / ".mettle" / "evaluations").read_text() == f"{chosen}\n"
    shutil.rmtree(chosen)
    assert find_evaluations(workspace) == []


def test_a_folder_of_evaluations_is_no_evaluation(saved, tmp_path):
    path = saved([[1.0]])
    assert is_collection(path.parents[1])
    assert not is_collection(path)
    assert not is_collection(tmp_path / "nothing")
    assert find_evaluations(path.parents[1]) == [path]


def test_a_workspace_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / ".mettle").write_text("a file")
    remember_place(tmp_path / "x", tmp_path)
    assert find_evaluations(tmp_path) == []
