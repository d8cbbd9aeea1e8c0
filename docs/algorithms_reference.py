"""The reference page of algorithms and losses, from their registries: what each file says of itself, and its options.

Parts: `algorithms_page`. Invariant: a registered algorithm or loss without a docstring, or a loss's option that nothing
is said of, ends the writing.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from mettle.orchestrator.algorithms import ALGORITHMS
from mettle.trainer.losses import LOSSES, PolicyLoss

INTRODUCTION = """# Algorithms and losses

What training makes of rollouts is decided in two places. An **algorithm** says what the tokens of a group are credited
with (`[orchestrator] algorithm`, its options in `algorithm_args`; each `[[orchestrator.envs]]` may have its own). A
**loss** says what a credited token contributes to the gradient (`[trainer.loss]`). Both can be
[yours](../how-to/write-an-algorithm.md). Each is one file, held to a NumPy twin by tests that go over the registry.

In the formulas r_i is the reward of rollout i and A the advantage; l is a token's log-probability under the policy that
is trained, m the one recorded when it was sampled, k = l - m, r = exp(k), D = exp(l) - exp(m); sg() has no gradient.
"""


def algorithms_page(note: str) -> str:
    """The page, which begins with `note`."""
    lines = [note, "", INTRODUCTION]
    lines += ["# Algorithms", ""]
    for name in sorted(ALGORITHMS.built_in):
        lines += _section(name, ALGORITHMS.find(name))
        lines += _arguments(ALGORITHMS.find(name))
    lines += ["# Losses", "", "Every loss has these options:", ""]
    lines += _fields(PolicyLoss, set())
    for name in sorted(LOSSES.built_in):
        lines += _section(name, LOSSES.find(name))
        lines += _fields(LOSSES.find(name), set(_declared(PolicyLoss)))
    return "\n".join(lines).rstrip() + "\n"


def _section(name: str, kind: Any) -> list[str]:
    text = inspect.getdoc(sys.modules[kind.__module__])
    assert text, f"{kind.__module__} says nothing of itself"
    return [f"## {name}", "", *text.strip().splitlines(), ""]


def _arguments(kind: Any) -> list[str]:
    found = [p for p in inspect.signature(kind).parameters.values() if p.kind is p.KEYWORD_ONLY]
    if not found:
        return []
    lines = ["| option | type | default |", "|---|---|---|"]
    lines += [f"| `{p.name}` | `{_cell(p.annotation)}` | `{p.default!r}` |" for p in found]
    return [*lines, "", inspect.cleandoc(kind.__doc__), ""]


def _declared(kind: type[BaseModel]) -> Iterator[str]:
    yield from kind.model_fields


def _fields(kind: type[BaseModel], known: set[str]) -> list[str]:
    lines = []
    described = _docstrings(kind)
    for name, field in kind.model_fields.items():
        if name == "type" or (name in known and name not in described):
            continue
        meaning = described.get(name)
        assert meaning, f"{kind.__name__}.{name} says nothing of itself"
        lines.append(f"| `{name}` | `{field.default!r}` | {_cell(meaning)} |")
    return ["| option | default | meaning |", "|---|---|---|", *lines, ""] if lines else []


def _docstrings(kind: type[BaseModel]) -> dict[str, str]:
    """What stands under each field of the class's own source."""
    tree = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return found


def _cell(text: Any) -> str:
    return str(text).replace("|", "\\|")
