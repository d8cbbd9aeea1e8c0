"""The table of languages, and what is said about entries that cannot work."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from mettle.errors import UserError
from mettle.sandbox import LanguageSpec, SandboxConfig, config
from mettle.sandbox.languages import BUILT_IN
from mettle.sandbox.toolchains import find_language, shown_paths, why_missing

OWN = LanguageSpec(name="own", aliases=("mine",), extension=".own", run=("sh", "{source}"))


def test_no_two_built_in_languages_have_a_name_in_common() -> None:
    names = [name for spec in BUILT_IN for name in spec.names]
    assert len(names) == len(set(names))


def test_a_language_is_found_by_name_and_alias_and_a_users_entry_comes_first() -> None:
    config = SandboxConfig(languages=(OWN, OWN.model_copy(update={"name": "cpp", "aliases": ()})))
    assert find_language(config, "Mine") == OWN
    assert find_language(config, "cpp").run == OWN.run
    assert find_language(SandboxConfig(), "c++").name == "cpp"
    for name in ("", None, 3, "brainfuck"):
        with pytest.raises(UserError, match="it runs python, bash"):
            find_language(config, name)


def test_a_program_that_the_sandbox_does_not_show_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "bin" / "ownlang"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent))
    spec = LanguageSpec(name="own", extension=".own", run=("ownlang", "{source}"))
    assert f"{tool} is not shown in the sandbox; add its directory to host_paths" in (why_missing(spec) or "")


def test_what_is_below_the_home_directory_is_shown_unless_the_sandbox_has_its_own_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = LanguageSpec(name="x", extension=".x", run=("x", "{source}"), host_paths=("~/tool*",))
    (tmp_path / "tools").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(config, "_COVERED", ("/elsewhere",))
    assert shown_paths([spec]) == (str(tmp_path / "tools"),)
    monkeypatch.setattr(config, "_COVERED", (str(tmp_path),))
    assert shown_paths([spec]) == ()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "has no run command"),
        ({"run": ("x",)}, "does not name {source}"),
        ({"run": ("{program}",), "compile": ("cc", "{source}")}, "does not say where {output} goes"),
        ({"run": ("x", "{source}"), "host_paths": ("/tmp/x",)}, "cannot be shown"),
        ({"run": ("x", "{source}"), "host_paths": ("opt/x",)}, "cannot be shown"),
        ({"run": ("x", "{source}"), "memory_mb": -1}, "memory_mb"),
        ({"run": ("x", "{source}"), "stem": "../x"}, "stem"),
    ],
)
def test_an_entry_that_cannot_work_is_refused_when_it_is_written(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError) as raised:
        LanguageSpec.model_validate({"name": "own", "extension": ".own", **fields})
    assert words in str(raised.value)
