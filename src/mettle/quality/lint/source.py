"""An environment's source as the rules read it: modules, the functions that score, what in them is output and gold.

Parts: `Module`, `Function`, `read_modules`, `scoring_functions`. A function scores when its parameters say so
(`completion`, `completions`), when it is given to a rubric, or when one that scores calls it. Invariant: nothing of
the environment is imported or run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mettle.errors import UserError
from mettle.quality.lint.rules import LintFinding, Rule

Role = Literal["score", "parser", "tool", "turn"]
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
OUTPUT_NAMES = frozenset({"completion", "completions", "response", "model_output", "generated", "prediction"})
GOLD_NAMES = frozenset(
    {
        "answer",
        "answers",
        "gold",
        "target",
        "expected",
        "ground_truth",
        "label",
        "solution",
        "reference",
        "correct_answer",
    }
)
TEST_NAME = re.compile(r"(^|_)(tests?|asserts?|assertions?|checks?|checker|harness|test_cases?|test_code)(_|$)")
SKIPPED_FOLDERS = frozenset({"tests", "outputs", "build", "dist", "node_modules", "__pycache__"})
RUBRIC_CALLS = frozenset({"add_reward_func", "add_metric"})
_ALLOW = re.compile(r"#\s*mettle:\s*allow\[([a-z, -]+)\]\s*(.*)")


@dataclass(slots=True)
class Function:
    """A function that scores. `outputs` and `golds` are the names in it that hold model output and right answers."""

    node: FunctionNode
    module: Module
    owner: str = ""
    role: Role = "score"
    outputs: set[str] = field(default_factory=set)
    golds: set[str] = field(default_factory=set)

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters, without self."""
        arguments = self.node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        return [each.arg for each in every if each.arg not in ("self", "cls")]

    def is_output(self, node: ast.AST | None) -> bool:
        """Whether an expression holds model output."""
        return node is not None and any(isinstance(n, ast.Name) and n.id in self.outputs for n in ast.walk(node))

    def is_gold(self, node: ast.AST | None) -> bool:
        """Whether an expression holds the right answer, and no output."""
        return (
            node is not None
            and not self.is_output(node)
            and any(isinstance(n, ast.Name) and n.id in self.golds for n in ast.walk(node))
        )


@dataclass(slots=True)
class Module:
    """One file."""

    path: Path
    name: str
    tree: ast.Module
    lines: list[str]
    functions: list[Function] = field(default_factory=list)

    def allowed(self, rule_id: str, line: int) -> str:
        """The reason of an allow comment for `rule_id` on this line, the one above, or at the function around it."""
        places = [line, line - 1]
        for function in self.functions:
            node = function.node
            if node.lineno <= line <= (node.end_lineno or node.lineno):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                places += [node.lineno, first - 1]
        for number in places:
            if 1 <= number <= len(self.lines):
                match = _ALLOW.search(self.lines[number - 1])
                if match and rule_id in [name.strip() for name in match[1].split(",")] and match[2].strip():
                    return match[2].strip()
        return ""

    def finding(self, rule: Rule, line: int, what: str) -> LintFinding:
        """A finding in this file."""
        return LintFinding(rule, self.name, line, what, self.allowed(rule.id, line))


def read_modules(path: Path) -> list[Module]:
    """The Python files of an environment's folder, or one file; tests are left out.

    Raises: UserError for a file that is not Python.
    """
    if path.is_file():
        files, root = [path], path.parent
    else:
        root = path
        files = [file for file in sorted(path.rglob("*.py")) if not _is_skipped(file.relative_to(path))]
    modules = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
            tree = ast.parse(text, filename=str(file))
        except (SyntaxError, UnicodeDecodeError, ValueError) as error:
            raise UserError(f"{file} is not Python that can be read: {error}") from error
        module = Module(file, str(file.relative_to(root)), tree, text.splitlines())
        module.functions = [Function(node, module, owner) for node, owner in _functions(tree)]
        modules.append(module)
    return modules


def scoring_functions(modules: list[Module]) -> list[Function]:
    """The functions that read model output (scoring, tools, turns), with what in them is output and what is gold."""
    by_name: dict[str, list[Function]] = {}
    for module in modules:
        for function in module.functions:
            by_name.setdefault(function.node.name, []).append(function)
    waiting = [each for module in modules for each in _starts(module, by_name)]
    found: dict[int, Function] = {}
    while waiting:
        function = waiting.pop()
        found[id(function)] = function
        spread(function)
        waiting += [each for each, has_grown in _calls_into(function, by_name) if has_grown or id(each) not in found]
    return sorted(found.values(), key=lambda each: (each.module.name, each.node.lineno))


def _starts(module: Module, by_name: dict[str, list[Function]]) -> Iterator[Function]:
    """Functions that say by their parameters, or by whom they are given to, that they read output."""
    for function in module.functions:
        parameters = set(function.parameters)
        if {"completion", "completions"} & parameters:
            function.outputs |= OUTPUT_NAMES & parameters
            function.golds |= GOLD_NAMES & parameters
            yield function
        elif function.node.name == "env_response":
            function.role = "turn"
            function.outputs |= {"messages"} & parameters
            yield function
    for name, role in _given(module.tree):
        for function in by_name.get(name, ()):
            function.role = role
            ordered = function.parameters
            if role == "tool":
                function.outputs |= set(ordered)
            elif role == "parser":
                function.outputs |= set(ordered[:1])
            else:
                function.outputs |= OUTPUT_NAMES & set(ordered)
                function.golds |= GOLD_NAMES & set(ordered)
            yield function


def spread(function: Function) -> None:
    """What is assigned from output is output, what is assigned from gold is gold; until nothing changes."""
    while True:
        before = len(function.outputs), len(function.golds)
        for node in ast.walk(function.node):
            for targets, value in _bindings(node):
                if function.is_output(value) or _reads_state_output(value):
                    function.outputs |= targets
                elif function.is_gold(value) or _reads_info_gold(value):
                    function.golds |= targets - function.outputs
        if before == (len(function.outputs), len(function.golds)):
            return


def call_name(node: ast.AST) -> str:
    """`re.search` of a call of it; "" of anything else."""
    if not isinstance(node, ast.Call):
        return ""
    try:
        return ast.unparse(node.func)
    except ValueError:
        return ""


def _calls_into(function: Function, by_name: dict[str, list[Function]]) -> Iterator[tuple[Function, bool]]:
    """The environment's own functions that are called, and whether more is known of them now."""
    for node in ast.walk(function.node):
        if not isinstance(node, ast.Call):
            continue
        for called in by_name.get(call_name(node).rpartition(".")[2], ()):
            if called is function:
                continue
            before = len(called.outputs) + len(called.golds)
            given = [*zip(called.parameters, node.args, strict=False), *((k.arg, k.value) for k in node.keywords)]
            for parameter, value in given:
                if parameter and function.is_output(value):
                    called.outputs.add(parameter)
                elif parameter and function.is_gold(value):
                    called.golds.add(parameter)
            yield called, len(called.outputs) + len(called.golds) > before


def _bindings(node: ast.AST) -> Iterator[tuple[set[str], ast.expr]]:
    if isinstance(node, ast.Assign):
        yield {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}, node.value
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
        yield {n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)}, node.value
    elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        yield from _loop(node.target, node.iter)
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield {n.id for n in ast.walk(node.optional_vars) if isinstance(n, ast.Name)}, node.context_expr


def _loop(target: ast.expr, source: ast.expr) -> Iterator[tuple[set[str], ast.expr]]:
    """`for a, b in zip(xs, ys)` binds a to xs and b to ys."""
    if call_name(source) == "zip" and isinstance(source, ast.Call) and isinstance(target, ast.Tuple):
        for each, value in zip(target.elts, source.args, strict=False):
            yield {n.id for n in ast.walk(each) if isinstance(n, ast.Name)}, value
        return
    yield {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}, source


def _reads_state_output(node: ast.expr) -> bool:
    return any(
        isinstance(n, ast.Subscript)
        and ast.unparse(n.value) == "state"
        and isinstance(n.slice, ast.Constant)
        and n.slice.value in ("completion", "trajectory", "responses")
        for n in ast.walk(node)
    )


def _reads_info_gold(node: ast.expr) -> bool:
    """`info["answer"]`, `state["answer"]`, `info.get("tests")`."""
    for n in ast.walk(node):
        key = None
        if isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Constant):
            key, holder = n.slice.value, n.value
        elif isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "get" and n.args:
            key, holder = getattr(n.args[0], "value", None), n.func.value
        if isinstance(key, str) and ast.unparse(holder) in ("info", "state", "task", "row", 'state["info"]'):
            return key in GOLD_NAMES
    return False


def _functions(tree: ast.AST, owner: str = "") -> Iterator[tuple[FunctionNode, str]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, node.name)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, owner
            yield from _functions(node, owner)
        else:
            yield from _functions(node, owner)


def _given(tree: ast.AST) -> Iterator[tuple[str, Role]]:
    """Names of functions that are given to rubrics, parsers and tool environments."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = call_name(node).rpartition(".")[2]
        keywords = {k.arg: k.value for k in node.keywords if k.arg}
        first = node.args[:1]
        if name in RUBRIC_CALLS:
            yield from ((each, "score") for value in first for each in _names(value))
        elif name.endswith("Rubric"):
            values = [keywords["funcs"]] if "funcs" in keywords else first
            yield from ((each, "score") for value in values for each in _names(value))
        elif name.endswith("Parser"):
            values = [keywords["extract_fn"]] if "extract_fn" in keywords else first
            yield from ((each, "parser") for value in values for each in _names(value))
        if "tools" in keywords:
            yield from ((each, "tool") for each in _names(keywords["tools"]))


def _names(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            yield each.id
        elif isinstance(each, ast.Attribute):
            yield each.attr


def _is_skipped(path: Path) -> bool:
    return bool(SKIPPED_FOLDERS & set(path.parts)) or any(part.startswith(".") for part in path.parts)
