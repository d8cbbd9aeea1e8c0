"""An environment package made from a dataset: its rows, the prompt, parser and reward that suit them, and tests.

Parts: `create_from_data`. Invariant: what is written passes its tests and its reward test at once; where the data does
not allow that, nothing is written.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from mettle.envs.packages.scaffold import fill, manifest, package_name, package_texts, write_package
from mettle.errors import UserError
from mettle.quality.data.prepared import PreparedRows, prepare_rows
from mettle.quality.data.recipes import RewardRecipe
from mettle.quality.data.report import DataReport

_MODULE = '''"""{title}: {num_rows} rows of {source}; answers are {format}."""

from __future__ import annotations

{imports}
import mettle.envs as vf

DATA = Path(__file__).with_name("{module}_data.jsonl")
SYSTEM_PROMPT = (
{prompt}
)


def read_rows(split: str, num_rows: int) -> list[dict[str, Any]]:
    """Rows of one split; the first `num_rows`, or all with -1."""
    with DATA.open(encoding="utf-8") as file:
        rows = [row for row in map(json.loads, file) if row.pop("split") == split]
    return rows if num_rows < 0 else rows[:num_rows]


{functions}def demonstrate(messages: Any, row: Any) -> str:
    """What is wanted: the right answer where it is looked for."""
    return {demonstration}


def load_environment(
    num_train: int = -1, num_eval: int = -1, system_prompt: str = SYSTEM_PROMPT
) -> vf.SingleTurnEnv:
    """The environment; arguments come from `-a` or from the run's config."""
    parser = {parser}
    rubric = {rubric}
    return vf.SingleTurnEnv(
        dataset=lambda: read_rows("train", num_train),
        eval_dataset=lambda: read_rows("eval", num_eval),
        system_prompt=system_prompt,
        parser=parser,
        rubric=rubric,
        demonstrate=demonstrate,{pass_on}
    )
'''
_ARGUMENTS = (
    ("num_train", "-1", "training rows; -1 for all"),
    ("num_eval", "-1", "evaluation rows; -1 for all"),
    ("system_prompt", "see the module", "what the model is told first"),
)
MAX_PROMPT_LINE = 100


@dataclass(frozen=True, slots=True)
class MadePackage:
    """The folder, and what went into it."""

    folder: Path
    prepared: PreparedRows
    recipe: RewardRecipe


def create_from_data(name: str, folder: Path, report: DataReport) -> MadePackage:
    """Write a package `name` that asks the questions of a dataset.

    Raises: UserError when the data has no answers that can be checked, or when the package exists.
    """
    if report.format is None or report.recipe is None:
        raise UserError(
            f"{report.dataset.name} has no column that looks like an answer; name it with --answer COLUMN"
            f" (there are {', '.join(column.name for column in report.columns)})"
        )
    name, module = package_name(name)
    prepared = prepare_rows(report.dataset.splits, report.roles, report.format)
    recipe = report.recipe
    title = name.replace("-", " ").capitalize()
    main = "passes_all_tests" if recipe.format == "code" else "correct"
    rewards = [(f"reward `{main}`", recipe.reward)]
    if recipe.format == "code":
        rewards.append(("metrics `fraction_passed`, `format_has_code`", "share of the tests; whether there was code"))
    if "overlap" in recipe.rubric:
        rewards[0] = ("reward `correct` (0.7)", recipe.reward)
        rewards.append(("reward `overlap` (0.3)", "words shared with a reference of five words or more (F1)"))
    if "answer_format" in recipe.rubric:
        rewards.append(("reward `answer_format` (0.1)", "1 when there is an answer where it is looked for"))
    about = f"{len(prepared.rows)} rows of `{Path(report.dataset.name).name}`. {recipe.system_prompt}"
    files = {
        f"{module}.py": _module(name, title, report, prepared, recipe),
        f"{module}_data.jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in prepared.rows),
        **package_texts(name, about=about, rewards=rewards, arguments=_ARGUMENTS),
        "pyproject.toml": manifest(
            name, f"{title}.", [recipe.format, "single-turn"], [f"{module}.py", f"{module}_data.jsonl"]
        ),
        f"tests/test_{module}.py": fill("test.py", name=name),
    }
    return MadePackage(write_package(name, folder, files), prepared, recipe)


def _module(name: str, title: str, report: DataReport, prepared: PreparedRows, recipe: RewardRecipe) -> str:
    standard = {"import json", "from pathlib import Path", "from typing import Any", *recipe.imports}
    ordered = sorted(standard, key=lambda line: (line.startswith("from"), line))
    return _MODULE.format(
        title=title,
        num_rows=len(prepared.rows),
        source=re.sub(r"[^\w.:-]", "_", Path(report.dataset.name).name),
        format=recipe.format,
        imports="\n".join(ordered) + "\n",
        module=name.replace("-", "_"),
        prompt="\n".join(f"    {json.dumps(line, ensure_ascii=False)}" for line in _pieces(recipe.system_prompt)),
        functions=f"{recipe.functions}\n\n" if recipe.functions else "",
        demonstration=recipe.demonstration,
        parser=recipe.parser,
        rubric=recipe.rubric,
        pass_on=f'\n        pass_on="{recipe.pass_on}",' if recipe.pass_on else "",
    )


def _pieces(text: str) -> list[str]:
    """A long text as pieces that stand on lines of their own."""
    pieces, current = [], ""
    for word in text.split(" "):
        if len(current) + len(word) > MAX_PROMPT_LINE:
            pieces.append(current)
            current = ""
        current += f"{word} "
    return [*pieces, current.rstrip(" ")]
