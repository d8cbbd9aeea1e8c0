"""A new environment package that runs as it is.

Parts: `create_environment`. Invariants: nothing that exists is overwritten; what is written installs, loads and passes
its own test without an edit.
"""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from mettle.envs.packages.registry import ENTRY_POINT_GROUP, normalized
from mettle.errors import StorageError, UserError

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")

_MODULE = '''"""{title}: say here what the model is asked, and what a good answer is."""

from __future__ import annotations

from typing import Any

import mettle.envs as vf

ROWS = [
    {{"question": "What is the capital of France? Answer with one word.", "answer": "Paris"}},
    {{"question": "What is the capital of Japan? Answer with one word.", "answer": "Tokyo"}},
    {{"question": "What is the capital of Kenya? Answer with one word.", "answer": "Nairobi"}},
]


def correct(completion: Any, answer: str, parser: Any) -> float:
    """1 when the response is the answer, whatever its case."""
    return float((parser.parse_answer(completion) or "").strip().lower() == answer.lower())


def num_characters(completion: Any, parser: Any) -> float:
    """Length of the response; recorded, not rewarded."""
    return float(len(parser.parse_answer(completion) or ""))


def load_environment(num_examples: int = -1) -> vf.SingleTurnEnv:
    """The environment; arguments come from `-a` or from the run's config."""
    rows = ROWS if num_examples < 0 else ROWS[:num_examples]
    parser = vf.MaybeThinkParser()
    rubric = vf.Rubric(funcs=[correct, num_characters], weights=[1.0, 0.0], parser=parser)
    return vf.SingleTurnEnv(dataset=rows, eval_dataset=rows, parser=parser, rubric=rubric)
'''

_PYPROJECT = """[build-system]
requires = ["hatchling>=1.25"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "0.1.0"
description = "{title}."
readme = "README.md"
requires-python = ">=3.11"
keywords = ["single-turn"]
dependencies = ["mettle"]

[project.entry-points."{group}"]
{name} = "{module}:load_environment"

[tool.hatch.build.targets.wheel]
include = ["{module}.py"]

[tool.hatch.build.targets.sdist]
include = ["{module}.py", "README.md", "tests"]
"""

_README = """# {name}

Say here what the model is asked.

| | |
|---|---|
| reward `correct` | 1 when the response is the answer, whatever its case |
| metric `num_characters` | length of the response |

| argument | default | |
|---|---|---|
| `num_examples` | -1 | rows to use; -1 for all |

```
mettle eval run {name} -m MODEL -b http://127.0.0.1:8000/v1 -n 3
```
"""

_TEST = '''"""The gold answer must score 1, and nonsense 0: an environment that fails this cannot teach anything."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import mettle.envs as vf


class Scripted(vf.Client):
    """Says what it is told to say."""

    def __init__(self, text: str) -> None:
        self.text = text

    async def get_response(
        self, prompt: Any, model: str, sampling_args: Any = None, tools: Any = None, **_: Any
    ) -> vf.Response:
        message = vf.ResponseMessage(content=self.text, finish_reason="stop", is_truncated=False)
        return vf.Response(id="", created=0, model=model, usage=None, message=message)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_the_gold_answer_scores_one_and_nonsense_zero(index: int) -> None:
    env = vf.load_environment("{name}")
    row = env.get_dataset()[index]
    gold = asyncio.run(env.run_rollout(row, Scripted(row["answer"]), "scripted"))
    nonsense = asyncio.run(env.run_rollout(row, Scripted("xyzzy"), "scripted"))
    assert gold["error"] is None
    assert (gold["reward"], nonsense["reward"]) == (1.0, 0.0)
'''


def create_environment(name: str, folder: Path) -> Path:
    """Write a new package `name` (or `owner/name`) into `folder` (usually `./environments`); the path of the package.

    Raises: UserError when the name cannot be a package's, or when the package exists.
    """
    owner, _, name = normalized(name).rpartition("/")
    module = name.replace("-", "_")
    if not _NAME.fullmatch(name) or keyword.iskeyword(module) or not _NAME.fullmatch(owner or name):
        raise UserError(f"{name!r} cannot be an environment's name; use small letters, digits and -, as in my-task")
    package = folder / module
    if package.exists():
        raise UserError(f"{package} exists already; choose another name, or remove it")
    values = {"name": name, "module": module, "title": name.replace("-", " ").capitalize(), "group": ENTRY_POINT_GROUP}
    files = {
        f"{module}.py": _MODULE.format(**values),
        "pyproject.toml": _PYPROJECT.format(**values),
        "README.md": _README.format(**values),
        f"tests/test_{module}.py": _TEST.replace("{name}", name),
    }
    try:
        for path, text in files.items():
            target = package / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {package}: {error.strerror}") from error
    return package
