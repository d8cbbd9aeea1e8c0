"""Rules about how the output is compared with the right answer: substrings, the first of many, any of many.

Parts: `matching_rules`. Invariant: a comparison of whole values (`==`, `fullmatch`) is never a finding.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from mettle.quality.lint.rules import RULES, LintFinding
from mettle.quality.lint.source import Function, call_name

MANY = re.compile(r"\\d|\[[^\]]*(0-9|A-[B-Z]|a-[b-z])[^\]]*\]|ABCD|abcd")
"""A pattern that matches in many places of an ordinary text: numbers, choice letters."""
MARKED = re.compile(r"boxed|####|<[a-z/?\w]+>|answer|final|result|\^|\$$", re.IGNORECASE)
"""A pattern that is bound to a mark, so its first match is the marked one."""
SEARCHES = frozenset({"find", "index", "count", "rfind", "startswith", "endswith"})
SPLITS = frozenset({"split", "splitlines", "findall", "finditer", "split_answers", "words"})


def matching_rules(function: Function) -> Iterator[LintFinding]:
    """All findings of these rules in one function."""
    lists = _lists(function)
    for node in ast.walk(function.node):
        if isinstance(node, ast.Compare):
            yield from _membership(function, node, lists)
        elif isinstance(node, ast.Call):
            yield from _search_call(function, node)
            yield from _any_call(function, node, lists)
            yield from _first_search(function, node)
        elif isinstance(node, ast.Subscript):
            yield from _first_item(function, node)


def _membership(function: Function, node: ast.Compare, lists: set[str]) -> Iterator[LintFinding]:
    """`answer in text` and `text in answer`."""
    for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
        if not isinstance(op, ast.In | ast.NotIn) or isinstance(right, ast.Tuple | ast.List | ast.Set | ast.Dict):
            continue
        shown = ast.unparse(ast.Compare(left, [op], [right]))
        if function.is_gold(left) and function.is_output(right):
            if _is_list(function, right, lists):
                yield _found(function, "any-match", node, f"`{shown}` asks whether one of several is the answer")
            else:
                yield _found(function, "gold-substring", node, f"`{shown}` looks for the right answer in the output")
        elif function.is_output(left) and function.is_gold(right) and not _is_list(function, right, lists):
            yield _found(function, "output-substring", node, f"`{shown}` looks for the output in the right answer")


def _search_call(function: Function, node: ast.Call) -> Iterator[LintFinding]:
    """`text.find(answer)`, `re.search(re.escape(answer), text)`."""
    name = call_name(node)
    method = name.rpartition(".")[2]
    shown = ast.unparse(node)
    if isinstance(node.func, ast.Attribute) and method in SEARCHES and node.args:
        if function.is_output(node.func.value) and function.is_gold(node.args[0]):
            yield _found(function, "gold-substring", node, f"`{shown}` looks for the right answer in the output")
        elif function.is_gold(node.func.value) and function.is_output(node.args[0]):
            yield _found(function, "output-substring", node, f"`{shown}` looks for the output in the right answer")
    if name in ("re.search", "re.findall", "re.finditer", "re.match") and len(node.args) >= 2:
        pattern, text = node.args[:2]
        marked = isinstance(pattern, ast.JoinedStr) and MARKED.search(ast.unparse(pattern))
        if function.is_gold(pattern) and function.is_output(text) and not marked:
            yield _found(function, "gold-substring", node, f"`{shown}` searches the output for the right answer")


def _any_call(function: Function, node: ast.Call, lists: set[str]) -> Iterator[LintFinding]:
    """`any(n == answer for n in re.findall(...))`."""
    if call_name(node) != "any" or not node.args or not isinstance(node.args[0], ast.GeneratorExp | ast.ListComp):
        return
    made = node.args[0]
    compares = [
        each
        for each in ast.walk(made.elt)
        if isinstance(each, ast.Compare) and isinstance(each.ops[0], ast.Eq | ast.In)
    ]
    sides = [side for each in compares for side in (each.left, *each.comparators)]
    sides += [each for each in ast.walk(made.elt) if isinstance(each, ast.Call)]
    source = made.generators[0].iter
    if any(function.is_gold(side) or _holds_gold(function, side) for side in sides) and function.is_output(source):
        yield _found(function, "any-match", node, f"`{_short(node)}` takes any of the output's candidates")


def _first_search(function: Function, node: ast.Call) -> Iterator[LintFinding]:
    """`re.search(r"\\d+", completion)`."""
    name = call_name(node)
    if name != "re.search" and not (name.endswith(".search") and len(node.args) == 1):
        return
    text = node.args[1] if name == "re.search" and len(node.args) > 1 else node.args[0] if node.args else None
    pattern = _pattern(function, node)
    if pattern and function.is_output(text) and MANY.search(pattern) and not MARKED.search(pattern):
        yield _found(function, "first-match", node, f"`{_short(node)}` takes the first of what may be many")


def _first_item(function: Function, node: ast.Subscript) -> Iterator[LintFinding]:
    """`re.findall(r"\\d+", completion)[0]`, and the same through a name."""
    if not (isinstance(node.slice, ast.Constant) and node.slice.value == 0):
        return
    source: ast.AST | None = node.value
    if isinstance(source, ast.Name):
        source = _assigned(function, source.id)
    if not isinstance(source, ast.Call) or not call_name(source).endswith("findall"):
        return
    text = source.args[-1] if source.args else None
    pattern = _pattern(function, source)
    if pattern and function.is_output(text) and MANY.search(pattern) and not MARKED.search(pattern):
        yield _found(function, "first-match", node, f"`{_short(node)}` takes the first of what may be many")


def _pattern(function: Function, node: ast.Call) -> str:
    """The pattern of a search, written there or compiled in the module."""
    if call_name(node).startswith("re.") and node.args:
        return _text(node.args[0]) or _text(_module_value(function, node.args[0]))
    if isinstance(node.func, ast.Attribute):
        compiled = _module_value(function, node.func.value)
        if isinstance(compiled, ast.Call) and call_name(compiled) == "re.compile" and compiled.args:
            return _text(compiled.args[0])
    return ""


def _module_value(function: Function, node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.Name):
        return node
    for statement in function.module.tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if any(isinstance(target, ast.Name) and target.id == node.id for target in targets):
                return statement.value
    return None


def _assigned(function: Function, name: str) -> ast.AST | None:
    for node in ast.walk(function.node):
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return node.value
    return None


def _lists(function: Function) -> set[str]:
    """Names that hold several candidates: what a split or a findall gave."""
    found = set()
    for node in ast.walk(function.node):
        if isinstance(node, ast.Assign) and _makes_list(node.value):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def _is_list(function: Function, node: ast.AST, lists: set[str]) -> bool:
    return (isinstance(node, ast.Name) and node.id in lists) or _makes_list(node)


def _makes_list(node: ast.AST) -> bool:
    if isinstance(node, ast.ListComp | ast.SetComp | ast.List | ast.Set):
        return True
    name = call_name(node).rpartition(".")[2]
    return name in SPLITS or (name in ("set", "list") and isinstance(node, ast.Call) and bool(node.args))


def _holds_gold(function: Function, node: ast.AST) -> bool:
    return any(isinstance(each, ast.Name) and each.id in function.golds for each in ast.walk(node))


def _text(node: ast.AST | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _short(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 90 else text[:87] + "..."


def _found(function: Function, rule: str, node: ast.AST, what: str) -> LintFinding:
    return function.module.finding(RULES[rule], getattr(node, "lineno", function.node.lineno), what)
