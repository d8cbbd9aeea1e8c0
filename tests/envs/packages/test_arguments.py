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

    def run(text, *given, module="words", place="words.py", **values):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(RUNS_NOTHING + text)
        check_arguments(
            "me/words", EnvironmentEntry("words", "1", module, folder=tmp_path), dict.fromkeys(given, 1) | values
        )

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


@pytest.mark.parametrize(
    ("annotation", "right", "wrong"),
    [
        ("int", [3, -1], ["3", 3.0, True, None, [3], {"a": 3}]),
        ("float", [3, 0.5], ["0.5", True]),
        ("bool", [True, False], ["false", 0]),
        ("str", ["train", ""], [3, ["train"], False]),
        ("str | None", ["train", None], [3]),
        ("'str | None'", ["train", None], [3]),
        ("typing.Optional[int]", [3, None], ["3"]),
        ("Union[int, str]", [3, "3"], [[3], 0.5]),
        ("Literal['easy', 'hard']", ["easy"], ["esay", 1, True]),
        ("Literal[1, 2]", [1], [True, "1", 3]),
        ("list[str]", [["a", "b"], []], ["ab", ["a", 1], {"a": 1}]),
        ("Sequence[int]", [[1]], [1, "1"]),
        ("tuple[int, str]", [[1, "a"]], ["ab"]),
        ("dict[str, int]", [{"a": 1}], [[1], {"a": "1"}, "a"]),
        ("Mapping", [{"a": 1}], [[1]]),
        ("Callable[[int], str]", ["words.judge", 3], []),
        ("vf.SandboxSpec | None", [3, {"image": "x"}], []),
        ("list[Level]", [["easy"]], ["easy"]),
        ("Any", [3, "3", None], []),
    ],
)
def test_a_value_that_is_plainly_of_another_type_is_refused(check, annotation, right, wrong):
    text = f"def load_environment(path: str, *, level: {annotation}): ..."
    for value in right:
        check(text, path="p", level=value)
    for value in wrong:
        with pytest.raises(UserError, match=r"^me/words: the argument level is of type .*, and not "):
            check(text, path="p", level=value)


def test_an_annotation_that_its_own_default_belies_is_not_believed(check):
    check("def load_environment(seed: int = None): ...", seed="word")
    check("def load_environment(extra, /, seed: int = 'auto', size: int = len('x')): ...", seed=0.5, size=3)
    with pytest.raises(UserError, match="the argument size is of type int, and not 'big'"):
        check("def load_environment(extra, /, seed: int = 'auto', size: int = len('x')): ...", size="big")


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
        check_arguments("words", EnvironmentEntry("words", "1", "installed_words"), {"seed": 1})
    for module in ("no_such_module", "installed_words.inner"):
        check_arguments("words", EnvironmentEntry("words", "1", module), {"seed": 1})


def test_every_shipped_environment_says_plainly_what_it_takes():
    for entry in list_environments():
        with pytest.raises(UserError, match="takes no argument 'no_such'"):
            check_arguments(entry.name, entry, {"no_such": 1})
