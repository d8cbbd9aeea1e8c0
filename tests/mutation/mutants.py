"""Small faults put into a module's source, one at a time: a test suite that stays green under one has a gap there.

Parts: `mutants_of` lists the faults of a source in a fixed order, so that a seed picks the same ones every time;
`Mutant.plant` gives the syntax tree with that one fault in it.

What is changed: comparisons (a bound moved by one, an equality turned round), arithmetic, `and` and `or`, `not`, the
truth of a bare condition, numbers and booleans. What is left alone says nothing of behaviour: annotations, docstrings,
decorators, asserts and `strict=`, the arguments of an exception or a log line, the text of an f-string. Nor is an axis
that is counted from the end counted from the front: in an array of two dimensions -1 and 1 are the same.

Invariant: a mutant is named by where it is and what it does there, and planting it never changes the tree given.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
ALONG_AN_AXIS = frozenset(
    {"argmax", "cat", "cumsum", "gather", "log_softmax", "mean", "softmax", "sort", "squeeze", "sum", "unsqueeze"}
)


@dataclass(frozen=True)
class Mutant:
    """One fault: `change` is made at the node that `ast.walk` meets as number `index`."""

    line: int
    index: int
    operand: int
    what: str

    def plant(self, tree: ast.Module) -> ast.Module:
        """A copy of the tree with this fault in it."""
        mutated = copy.deepcopy(tree)
        node = next(node for index, node in enumerate(ast.walk(mutated)) if index == self.index)
        replacement = _faults(node)[self.operand][1]()
        if replacement is not node:
            _replace(mutated, node, ast.copy_location(replacement, node))
        return ast.fix_missing_locations(mutated)


def mutants_of(tree: ast.Module) -> list[Mutant]:
    """Every fault that can be planted, by line."""
    skipped = {id(inner) for node in ast.walk(tree) for part in _silent_parts(node) for inner in ast.walk(part)}
    found = [
        Mutant(node.lineno, index, operand, what)
        for index, node in enumerate(ast.walk(tree))
        if id(node) not in skipped and isinstance(node, ast.expr | ast.stmt)
        for operand, (what, _) in enumerate(_faults(node))
    ]
    return sorted(found, key=lambda mutant: (mutant.line, mutant.index, mutant.operand))


Fault = tuple[str, Callable[[], ast.AST]]


def _faults(node: ast.AST) -> list[Fault]:
    """What can be done to a node: the words for it, and a function that does it and returns the node to stand there."""
    match node:
        case ast.Compare(ops=operators):
            return [_operator_fault(node, operators, at, COMPARISONS[type(op)]) for at, op in enumerate(operators)]
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in ARITHMETIC:
            return [_assigned(node, "op", ARITHMETIC[type(op)]())]
        case ast.BoolOp(op=op):
            return [_assigned(node, "op", ast.Or() if isinstance(op, ast.And) else ast.And())]
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            return [(f"`{ast.unparse(node)}` lost its sign", lambda: operand)]
        case ast.Constant(value=bool() | int() | float()):
            return [_assigned(node, "value", _other(node.value))]
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test) if _is_bare(test):
            return [_assigned(node, "test", ast.UnaryOp(ast.Not(), test))]
    return []


def _operator_fault(node: ast.Compare, operators: list[ast.cmpop], at: int, other: type[ast.cmpop]) -> Fault:
    def plant() -> ast.AST:
        operators[at] = other()
        return node

    return f"`{ast.unparse(node)}`: {type(operators[at]).__name__} became {other.__name__}", plant


def _assigned(node: ast.AST, field: str, value: object) -> Fault:
    def plant() -> ast.AST:
        setattr(node, field, value)
        return node

    shown = ast.unparse(getattr(node, "test", node))
    return f"`{shown}`: {field} became {_shown(value)}", plant


def _shown(value: object) -> str:
    if isinstance(value, ast.UnaryOp):
        return "its opposite"
    return type(value).__name__ if isinstance(value, ast.AST) else repr(value)


def _other(value: bool | int | float) -> bool | int | float:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else value * 2 or 1.0


def _is_bare(test: ast.expr) -> bool:
    return not isinstance(test, ast.Compare | ast.BoolOp | ast.Constant) and not (
        isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    )


def _silent_parts(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a node in which a change says nothing of behaviour."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield from node.decorator_list
            yield from filter(None, [node.returns])
        case ast.ClassDef():
            yield from node.decorator_list
        case ast.arg(annotation=ast.expr() as annotation):
            yield annotation
        case ast.AnnAssign():
            yield node.annotation
        case ast.Assert():
            yield node
        case ast.Raise(exc=ast.Call() as made):
            yield from [*made.args, *made.keywords]
        case ast.JoinedStr():
            yield node
        case ast.Call(func=ast.Attribute(value=ast.Name(id="logger" | "warnings"))):
            yield node
        case ast.Call(func=ast.Attribute(attr=name), args=arguments, keywords=keywords):
            yield from (keyword for keyword in keywords if keyword.arg in ("strict", "dim", "axis"))
            yield from (argument for argument in arguments if name in ALONG_AN_AXIS and _is_last_axis(argument))
        case ast.Call(keywords=keywords):
            yield from (keyword for keyword in keywords if keyword.arg == "strict")
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            yield node


def _is_last_axis(argument: ast.expr) -> bool:
    return isinstance(argument, ast.UnaryOp) and ast.unparse(argument) == "-1"


def _replace(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, field, new)
            elif isinstance(value, list) and any(item is old for item in value):
                value[:] = [new if item is old else item for item in value]
