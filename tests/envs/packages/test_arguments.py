"""What an environment takes is read from its source, and nothing of it runs for that."""

from __future__ import annotations

import pytest

from mettle.envs.packages.arguments import check_arguments
from mettle.envs.packages.registry import EnvironmentEntry, list_environments
from mettle.errors import UserError

RUNS_NOTHING = "raise SystemExit('this module was run')\n"


@pytest.fixture
def check(tmp_path):
    """Hold arguments against a module of this text."""

    def run(text, *given, module="words", place="words.py"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(RUNS_NOTHING + text)
        check_arguments("me/words", EnvironmentEntry("words", "1", module, folder=tmp_path), given)

    return run


def test_an_unknown_argument_is_told_the_nearest_and_those_there_are(check):
    text = "def load_environment(num_train: int = 3, /, extra=1, *, seed=0): ..."
    check("def load_environment(num_train=3, *, seed=0): ...", "seed", "num_train")
    with pytest.raises(
        UserError, match=r"^me/words takes no argument 'num_trian'; did you mean 'num_train'\? it takes "
    ):
        check("def load_environment(num_train=3, *, seed=0): ...", "num_trian")
    with pytest.raises(UserError, match="takes no argument 'num_train'"):
        check(text, "num_train")  # loading passes each by its name
    with pytest.raises(UserError, match="it takes none"):
        check("def load_environment(): ...", "seed")


def test_an_argument_without_a_default_is_asked_for(check):
    for text in ("def load_environment(seed=0, *, path): ...", "def load_environment(path, seed=0): ..."):
        check(text, "path")
        with pytest.raises(UserError, match="wants the argument 'path', which has no default: give it in its args"):
            check(text, "seed")


@pytest.mark.parametrize(
    "text",
    [
        "def load_environment(**kwargs): ...",
        "from .inner import load_environment",
        "from inner import load as load_environment",
        "@cached\ndef load_environment(): ...",
        "def load_environment(): ...\nload_environment = other(load_environment)",
        "if x:\n    def load_environment(): ...\nelse:\n    def load_environment(seed): ...",
        "async def load_environment(): ...",
        "def (",
        "",
    ],
)
def test_what_the_source_does_not_say_plainly_is_left_to_loading(check, text):
    check(text, "seed")


def test_a_call_of_it_and_what_stands_in_other_functions_make_no_difference(check):
    text = "def load_environment(n=1): ...\ndef test():\n    load_environment = 1\nif x:\n    load_environment()"
    with pytest.raises(UserError, match="'seed'"):
        check(text, "seed")


@pytest.mark.parametrize("place", ["src/words/__init__.py", "src/words.py", "words/__init__.py"])
def test_the_module_is_found_where_a_package_has_it(check, place):
    with pytest.raises(UserError, match="'seed'"):
        check("def load_environment(n=1): ...", "seed", place=place)
    check("def load_environment(n=1): ...", "seed", module="elsewhere", place=place)


def test_an_installed_module_is_read_where_it_lies(tmp_path, monkeypatch):
    (tmp_path / "installed_words.py").write_text(RUNS_NOTHING + "def load_environment(n=1): ...")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="'seed'"):
        check_arguments("words", EnvironmentEntry("words", "1", "installed_words"), ["seed"])
    for module in ("no_such_module", "installed_words.inner"):
        check_arguments("words", EnvironmentEntry("words", "1", module), ["seed"])


def test_every_shipped_environment_says_plainly_what_it_takes():
    for entry in list_environments():
        with pytest.raises(UserError, match="takes no argument 'no_such'"):
            check_arguments(entry.name, entry, ["no_such"])
