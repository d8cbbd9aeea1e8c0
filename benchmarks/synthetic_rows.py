"""Rows that stand in for a dataset, made from how a source uses them.

Parts: `make_rows`. Every name that the source looks up by a string (`row["label"]`, `row.get("label")`) is a column;
its value suits what is done with it (indexed, compared with a number, parsed as JSON). Invariant: the same source gives
the same rows.
"""

from __future__ import annotations

import ast
from typing import Any

NUM_ROWS = 2400
SENTENCE = "This is sentence number {} of a text that is long enough to be cut, split and summarised by anybody"
TEXT = ". ".join(SENTENCE.format(number) for number in range(8)) + "."
KNOWN: dict[str, Any] = {
    "question": "What is 2 + 2?",
    "answer": "4",
    "problem": "What is 2 + 2?",
    "solution": "It is \\boxed{4}.",
    "text": TEXT,
    "Question": "What is 2 + 2?",
    "Correct Answer": "4",
    "Incorrect Answer 1": "1",
    "Incorrect Answer 2": "2",
    "Incorrect Answer 3": "3",
    "choices": ["1", "2", "3", "4"],
    "level": "1",
    "type": "x",
}


def make_rows(source: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `load_dataset(*args, **kwargs)` gives a module with this source."""
    from datasets import Dataset, DatasetDict

    row = {**KNOWN, **columns_of(source)}
    if str(args[0] if args else "").endswith("gsm8k"):
        row["answer"] = "It is four.\n#### 4"
    rows = Dataset.from_list([row] * NUM_ROWS)
    if kwargs.get("split") is None and len(args) < 4:
        return DatasetDict({"train": rows, "test": rows, "validation": rows})
    return rows


def columns_of(source: str) -> dict[str, Any]:
    """A value for every column that the source looks up in a row."""
    finder, tree = _Finder(), ast.parse(source)
    finder.visit(tree)
    for name in _named_by_variables(tree):
        finder.uses.setdefault(name, [])
    return {name: _value(name, uses) for name, uses in finder.uses.items() if name not in KNOWN and name not in _OURS}


def _named_by_variables(tree: ast.AST) -> set[str]:
    """What a variable may hold that is looked up in a row: `row[column]`, after `column = "a" if short else "b"`."""
    looked_up = {
        node.slice.id for node in ast.walk(tree) if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Name)
    }
    named: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id in looked_up for t in node.targets):
            parts = [node.value.body, node.value.orelse] if isinstance(node.value, ast.IfExp) else [node.value]
            named |= {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}
    return named


_OURS = frozenset({"role", "content", "tool_calls", "info", "task", "trajectory", "completion", "example_id"})


class _Finder(ast.NodeVisitor):
    """Columns, each with the nodes that use it, one assignment further too."""

    def __init__(self) -> None:
        self.uses: dict[str, list[tuple[ast.AST, ast.AST]]] = {}
        self._parents: list[ast.AST] = []
        self._names: dict[str, str] = {}

    def visit(self, node: ast.AST) -> None:
        name = _column(node)
        if name is not None and self._parents:
            self._note(name, node)
        elif isinstance(node, ast.Name) and node.id in self._names and isinstance(node.ctx, ast.Load):
            self.uses[self._names[node.id]].append((node, self._parents[-1]))
        self._parents.append(node)
        self.generic_visit(node)
        self._parents.pop()

    def _note(self, name: str, node: ast.AST) -> None:
        parent = self._parents[-1]
        self.uses.setdefault(name, []).append((node, parent))
        if isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Name):
            self._names[parent.targets[0].id] = name


def _column(node: ast.AST) -> str | None:
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        key = node.slice
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
        key = node.args[0]
    else:
        return None
    return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else None


def _value(name: str, uses: list[tuple[ast.AST, ast.AST]]) -> Any:
    if "image" in name:
        return _image()
    if name == "prompt" and any(
        isinstance(parent, ast.Subscript | ast.Assign | ast.comprehension) for _, parent in uses
    ):
        return [{"role": "user", "content": f"Do this.\n---\n{TEXT}"}]
    if name.endswith("labels"):
        return [0]
    for node, parent in uses:
        made = _suited(node, parent)
        if made is not None:
            return made
    return TEXT if name in ("article", "passage", "context", "body") else "4"


def _suited(node: ast.AST, parent: ast.AST) -> Any:
    if isinstance(node, ast.Call) and len(node.args) == 2 and isinstance(node.args[1], ast.Constant):
        default = node.args[1].value
        if type(default) in (int, float, bool):
            return default
    if isinstance(parent, ast.Subscript) and parent.value is node:
        return _indexed(parent.slice)
    if isinstance(parent, ast.Subscript):
        return 0
    if isinstance(parent, ast.Compare | ast.BinOp):
        sides = [parent.left, *parent.comparators] if isinstance(parent, ast.Compare) else [parent.left, parent.right]
        numbers = [side.value for side in sides if isinstance(side, ast.Constant) and type(side.value) in (int, float)]
        return numbers[0] if numbers else None
    if isinstance(parent, ast.Call) and node in parent.args:
        return _argument(parent)
    if isinstance(parent, ast.For | ast.comprehension) and parent.iter is node:
        return ["4"]
    return None


def _indexed(key: ast.AST) -> Any:
    if isinstance(key, ast.Constant) and isinstance(key.value, str):
        return {key.value: ["4"]}
    return ["4", "4", "4", "4"] if isinstance(key, ast.Constant | ast.Slice) else None


def _argument(call: ast.Call) -> Any:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return {"loads": "[]", "literal_eval": "['1', '2', '3', '4']", "int": "4", "float": "4", "join": ["4"]}.get(name)


def _image() -> Any:
    from PIL import Image

    return Image.new("RGB", (8, 8))
