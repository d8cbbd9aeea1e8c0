"""A command that a person is told to type next can be typed."""

import sys

from mettle.runs.program import program


def test_a_program_on_the_path_goes_by_its_name(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(sys, "argv", ["/usr/bin/mettle"])
    assert program() == "mettle"


def test_a_program_that_is_not_on_the_path_goes_by_what_was_typed(monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [".venv/bin/mettle"])
    assert program() == ".venv/bin/mettle"
    monkeypatch.setattr(sys, "argv", ["/elsewhere/bin/mettle"])
    assert program() == "/elsewhere/bin/mettle"


def test_a_module_that_is_run_is_called_by_the_programs_name(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/src/mettle/cli/__main__.py"])
    assert program() == "mettle"
