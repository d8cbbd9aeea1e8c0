"""Rules about how scoring behaves: exceptions, chance, what it keeps between rollouts, what it makes of errors.

Parts: `conduct_rules` (of a function that scores), `module_rules` (judge prompts, class attributes). Invariant:
catching an exception that a bad answer raises (ValueError and its like) is never a finding.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from mettle.quality.lint.rules import RULES, LintFinding
from mettle.quality.lint.source import Function, Module, call_name

BROAD = frozenset({"Exception", "BaseException"})
CHANCE = re.compile(
    r"^(random\.(random|randint|choice|choices|uniform|shuffle|sample|gauss|randrange)|(np|numpy)\.random\.\w+"
    r"|uuid\.uuid[14]|secrets\.\w+|time\.time|time\.monotonic|datetime\.(datetime\.)?(now|today|utcnow)|os\.urandom)$"
)
SEEDED = frozenset({"default_rng", "RandomState", "Generator", "SeedSequence"})
CHANGES = frozenset({"append", "add", "update", "extend", "insert", "setdefault", "pop", "popitem", "clear", "remove"})
MUTABLE_CALLS = frozenset({"list", "dict", "set", "defaultdict", "Counter", "deque", "OrderedDict"})
FENCES = re.compile(r"(<[\w-]+>|```|\"\"\"|'''|~~~|\[BEGIN[^\]]*\]|---+)\s*$")


def conduct_rules(function: Function) -> Iterator[LintFinding]:
    """All findings of these rules in one function."""
    if function.role in ("score", "parser"):
        yield from _swallowed(function)
        yield from _chance(function)
        yield from _zeroed(function)
    yield from _shared(function)


def module_rules(module: Module) -> Iterator[LintFinding]:
    """Findings outside functions that score: prompts for judges, attributes that all rollouts share."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and call_name(node).endswith("JudgeRubric"):
            yield from _judge_prompt(module, node)
        elif isinstance(node, ast.ClassDef):
            yield from _class_state(module, node)


def _swallowed(function: Function) -> Iterator[LintFinding]:
    for node in ast.walk(function.node):
        if isinstance(node, ast.ExceptHandler):
            if _is_broad(node.type) and not any(isinstance(each, ast.Raise) for each in ast.walk(node)):
                caught = f"except {ast.unparse(node.type)}" if node.type is not None else "a bare except"
                yield _found(function, "swallowed-exception", node, f"{caught} ends in {_ending(node.body)}")
        elif call_name(node).endswith("suppress") and isinstance(node, ast.Call):
            for _ in filter(_is_broad, node.args):
                yield _found(function, "swallowed-exception", node, f"`{ast.unparse(node)}` hides every failure")


def _is_broad(node: ast.AST | None) -> bool:
    if node is None:
        return True
    names = node.elts if isinstance(node, ast.Tuple) else [node]
    return any(ast.unparse(each).rpartition(".")[2] in BROAD for each in names)


def _ending(body: list[ast.stmt]) -> str:
    last = body[-1]
    return f"`{ast.unparse(last)}`" if isinstance(last, ast.Return | ast.Pass | ast.Continue) else "going on"


def _chance(function: Function) -> Iterator[LintFinding]:
    for node in ast.walk(function.node):
        name = call_name(node)
        if CHANCE.match(name) and name.rpartition(".")[2] not in SEEDED:
            yield _found(function, "unseeded-random", node, f"`{name}` in scoring")


def _zeroed(function: Function) -> Iterator[LintFinding]:
    """`state["reward"] or 0`, `state.get("reward", 0)`: a failed rollout becomes a bad one."""
    for node in ast.walk(function.node):
        source: ast.AST | None = None
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or) and _is_number(node.values[-1]):
            source = node.values[0]
        elif isinstance(node, ast.Call) and call_name(node).endswith(".get") and len(node.args) == 2:
            source = node if _is_number(node.args[1]) else None
        if source is not None and re.search(r"\[?['\"](reward|score)['\"]", ast.unparse(source)):
            yield _found(function, "error-as-zero", node, f"`{ast.unparse(node)}`")


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _shared(function: Function) -> Iterator[LintFinding]:
    arguments = function.node.args
    for default in [*arguments.defaults, *arguments.kw_defaults]:
        if default is not None and _is_mutable(default):
            yield _found(
                function, "shared-state", default, f"the default `{ast.unparse(default)}` is one for all rollouts"
            )
    shared = _module_mutables(function.module) - set(function.parameters) - _local_names(function)
    for node in ast.walk(function.node):
        if isinstance(node, ast.Global):
            yield _found(function, "shared-state", node, f"`global {', '.join(node.names)}` in scoring")
        changed = _changed_name(node)
        if changed in shared:
            yield _found(function, "shared-state", node, f"`{changed}` of the module is changed while scoring")


def _class_state(module: Module, node: ast.ClassDef) -> Iterator[LintFinding]:
    shared = {
        target.id: statement
        for statement in node.body
        if isinstance(statement, ast.Assign) and _is_mutable(statement.value)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    assigned = {
        ast.unparse(target)
        for each in ast.walk(node)
        if isinstance(each, ast.Assign | ast.AnnAssign)
        for target in (each.targets if isinstance(each, ast.Assign) else [each.target])
    }
    for each in ast.walk(node):
        changed = _changed_name(each)
        name = changed.removeprefix("self.").removeprefix(f"{node.name}.") if changed else ""
        if changed and changed != name and name in shared and f"self.{name}" not in assigned:
            what = f"`{name}` belongs to the class {node.name}, and a rollout changes it"
            yield module.finding(RULES["shared-state"], getattr(each, "lineno", node.lineno), what)


def _judge_prompt(module: Module, node: ast.Call) -> Iterator[LintFinding]:
    """A judge prompt whose `{response}` stands between no marks, where the rubric is not told to make some."""
    if any(each.arg == "fence_material" and ast.unparse(each.value) == "True" for each in node.keywords):
        return
    for keyword in node.keywords:
        if keyword.arg != "judge_prompt":
            continue
        value: ast.AST | None = keyword.value
        if isinstance(value, ast.Name):
            value = _constant(module, value.id)
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            before, hole, _ = value.value.partition("{response}")
            if hole and not FENCES.search(before.rstrip(" ")):
                what = "`{response}` stands in the judge's prompt between no marks"
                yield module.finding(RULES["judge-raw-output"], keyword.value.lineno, what)


def _constant(module: Module, name: str) -> ast.AST | None:
    for statement in module.tree.body:
        if isinstance(statement, ast.Assign) and any(ast.unparse(target) == name for target in statement.targets):
            return statement.value
    return None


def _module_mutables(module: Module) -> set[str]:
    found = set()
    for statement in module.tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and _is_mutable(statement.value):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def _local_names(function: Function) -> set[str]:
    return {
        target.id
        for node in ast.walk(function.node)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _changed_name(node: ast.AST) -> str:
    """`x` of `x.append(...)`, `x[...] = ...`, `x[...] += ...`, `del x[...]`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
        return ast.unparse(node.func.value)
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        targets = list(node.targets)
    elif isinstance(node, ast.AugAssign):
        targets = [node.target]
    for target in targets:
        if isinstance(target, ast.Subscript):
            return ast.unparse(target.value)
    return ""


def _is_mutable(node: ast.AST | None) -> bool:
    if isinstance(node, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
        return True
    return isinstance(node, ast.Call) and call_name(node).rpartition(".")[2] in MUTABLE_CALLS


def _found(function: Function, rule: str, node: ast.AST, what: str) -> LintFinding:
    return function.module.finding(RULES[rule], getattr(node, "lineno", function.node.lineno), what)
