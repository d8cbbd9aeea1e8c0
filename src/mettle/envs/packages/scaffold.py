"""A new environment package that runs as it is.

Parts: `TEMPLATES`, `create_environment` (from a template), `write_package` (any files), `fill`. Invariants: nothing
that exists is overwritten; what is written installs, loads, passes its own test and its reward test without an edit.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mettle.envs.packages.registry import ENTRY_POINT_GROUP, normalized
from mettle.errors import StorageError, UserError

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_FOLDER = Path(__file__).with_name("templates")


@dataclass(frozen=True, slots=True)
class Template:
    """What the README and the manifest of a template say. Pairs: a name and its meaning; an argument also a default."""

    about: str
    rewards: tuple[tuple[str, str], ...]
    arguments: tuple[tuple[str, str, str], ...]
    test: str = "test"


TEMPLATES: dict[str, Template] = {
    "single-turn": Template(
        "Say here what the model is asked, and what a good answer is: one question, one answer.",
        (
            ("reward `correct`", "1 when the response is the answer, whatever its case"),
            ("metric `num_characters`", "length of the response"),
        ),
        (("num_examples", "-1", "rows to use; -1 for all"),),
    ),
    "multi-turn": Template(
        "A word with its letters in alphabetical order has to be put right; after a wrong try the model gets a hint.",
        (
            ("reward `solved`", "1 divided by the number of tries, 0 without the right word"),
            ("metric `num_tries`", "how often the model answered"),
        ),
        (("max_tries", "3", "model turns"),),
    ),
    "tool": Template(
        "The model looks up two prices with the tool `price_of` and gives their sum in answer tags.",
        (
            ("reward `correct`", "1 when the number in the answer tags is the right one"),
            ("metrics `total_tool_calls`, `price_of_calls`", "calls"),
        ),
        (("max_turns", "5", "model turns"),),
    ),
    "sandbox": Template(
        "The model writes a program that reads and prints; the sandbox runs it against tests that it never sees.",
        (
            ("reward `passes_all_tests`", "1 when the program passes every test"),
            ("metrics `fraction_passed`, `format_has_code`", "share of the tests passed; whether there was code"),
        ),
        (
            ("num_examples", "-1", "rows to use; -1 for all"),
            ("partial_credit", "false", "reward the share of tests passed instead"),
        ),
    ),
    "judge": Template(
        "The model answers in its own words; a judge model compares the answer with a reference and says yes or no.",
        (("reward `judged_right`", "1 when the judge begins with yes; no reward when it cannot be asked"),),
        (
            ("judge_model", "gpt-4.1-mini", "the judge"),
            ("judge_base_url", "https://api.openai.com/v1", "any OpenAI-compatible endpoint"),
            ("judge_key", "OPENAI_API_KEY", "environment variable that holds its key"),
        ),
        "judge_test",
    ),
    "game": Template(
        "The model and the environment take one to three matches in turn; who takes the last one wins.",
        (("reward `won`", "1 for a game that was won"), ("metric `num_moves`", "moves of the model")),
        (("max_matches", "30", "largest game"),),
    ),
}


def create_environment(name: str, folder: Path, template: str = "single-turn") -> Path:
    """Write a new package `name` (or `owner/name`) into `folder` (usually `./environments`); the path of the package.

    Raises: UserError when the name cannot be a package's, when there is no such template, or when the package exists.
    """
    if template not in TEMPLATES:
        raise UserError(f"there is no template {template!r}; there are {', '.join(TEMPLATES)}")
    name, module = package_name(name)
    chosen = TEMPLATES[template]
    title = name.replace("-", " ").capitalize()
    code = fill(f"{template.replace('-', '_')}.py", title=title)
    return write_package(
        name,
        folder,
        {
            f"{module}.py": code,
            **package_texts(name, about=chosen.about, rewards=chosen.rewards, arguments=chosen.arguments),
            "pyproject.toml": manifest(name, f"{title}.", [template], [f"{module}.py"]),
            f"tests/test_{module}.py": fill(f"{chosen.test}.py", name=name),
        },
    )


def package_name(name: str) -> tuple[str, str]:
    """The name of the package (without an owner) and of its module.

    Raises: UserError when it cannot be a package's.
    """
    owner, _, name = normalized(name).rpartition("/")
    module = name.replace("-", "_")
    if not _NAME.fullmatch(name) or keyword.iskeyword(module) or not _NAME.fullmatch(owner or name):
        raise UserError(f"{name!r} cannot be an environment's name; use small letters, digits and -, as in my-task")
    return name, module


def package_texts(
    name: str, *, about: str, rewards: Sequence[tuple[str, str]], arguments: Sequence[tuple[str, str, str]]
) -> dict[str, str]:
    """The README of a package."""
    reward_rows = "\n".join(f"| {reward} | {meaning} |" for reward, meaning in rewards)
    argument_rows = "\n".join(f"| `{argument}` | {default} | {meaning} |" for argument, default, meaning in arguments)
    return {"README.md": fill("README.md", name=name, about=about, rewards=reward_rows, arguments=argument_rows)}


def manifest(name: str, description: str, keywords: Sequence[str], files: Sequence[str]) -> str:
    """The pyproject.toml of a package with these files at its top."""
    quoted = [", ".join(f'"{each}"' for each in values) for values in (keywords, files)]
    return fill(
        "pyproject.toml",
        name=name,
        module=name.replace("-", "_"),
        description=description.replace('"', "'"),
        keywords=quoted[0],
        files=quoted[1],
        group=ENTRY_POINT_GROUP,
    )


def fill(template: str, **values: str) -> str:
    """A template file with every `{{name}}` replaced."""
    text = (_FOLDER / f"{template}.txt").read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace("{{" + name + "}}", value)
    return text


def write_package(name: str, folder: Path, files: Mapping[str, str]) -> Path:
    """Write the files of a new package.

    Raises: UserError when the package exists; StorageError when it cannot be written.
    """
    package = folder / name.replace("-", "_")
    if package.exists():
        raise UserError(f"{package} exists already; choose another name, or remove it")
    try:
        for path, text in files.items():
            target = package / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {package}: {error.strerror}") from error
    return package
