"""Rules about what scoring runs and whom it asks: model code, tests beside it, judges, the network.

Parts: `execution_rules`. Invariant: what goes into `mettle.sandbox` is never a finding.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from mettle.quality.lint.rules import RULES, LintFinding
from mettle.quality.lint.source import TEST_NAME, Function, call_name

RUNS_TEXT = frozenset({"eval", "exec", "compile", "__import__", "os.system", "os.popen", "pickle.loads", "yaml.load"})
RUNS_PROCESS = re.compile(r"(^|\.)(subprocess\.\w+|create_subprocess_(exec|shell)|Popen|check_output|check_call)$")
RUNS_ELSEWHERE = re.compile(r"(^|\.)(execute_command|run_code|exec_code|execute|run_python|run_tests)$")
ASKS_JUDGE = re.compile(r"judge|completions\.create$|responses\.create$|get_response$|messages\.create$", re.IGNORECASE)
QUOTES = re.compile(
    r"(^|\.)(dumps|escape|quote|repr|fence|fenced|delimit|sanitize|sanitise|clean|b64encode)\w*$", re.IGNORECASE
)
REQUESTS = re.compile(
    r"^(requests\.(get|post|put|patch|delete|request|head)|(urllib\.request\.)?urlopen|socket\.create_connection"
    r"|http\.client\.HTTPS?Connection)$"
)
WRITES = re.compile(r"(^|\.)(write_text|write|upload|upload_file|write_bytes|write_file)$")


def execution_rules(function: Function) -> Iterator[LintFinding]:
    """All findings of these rules in one function."""
    calls = [node for node in ast.walk(function.node) if isinstance(node, ast.Call)]
    for node in calls:
        yield from _runs(function, node)
        yield from _requests(function, node)
    yield from _runs_file(function, calls)
    if function.role == "score":
        yield from _judged(function, calls)
    yield from _tested(function, calls)


def _runs(function: Function, node: ast.Call) -> Iterator[LintFinding]:
    name = call_name(node)
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    if (name in RUNS_TEXT or RUNS_PROCESS.search(name)) and any(function.is_output(each) for each in given):
        yield _found(function, "unsandboxed-execution", node, f"`{name}` is given model output")


def _runs_file(function: Function, calls: list[ast.Call]) -> Iterator[LintFinding]:
    """The output is written to a file, and a process is started."""
    started = [node for node in calls if RUNS_PROCESS.search(call_name(node)) or call_name(node) == "os.system"]
    is_written = any(WRITES.search(call_name(node)) and any(map(function.is_output, node.args)) for node in calls)
    for node in started[:1] if is_written else []:
        if not any(function.is_output(each) for each in node.args):
            yield _found(
                function, "unsandboxed-execution", node, f"`{call_name(node)}` runs a file that holds model output"
            )


def _requests(function: Function, node: ast.Call) -> Iterator[LintFinding]:
    name = call_name(node)
    if not REQUESTS.match(name):
        return
    num_positional = {"urlopen": 3, "urllib.request.urlopen": 3, "socket.create_connection": 2}.get(name, 99)
    if not any(keyword.arg in ("timeout", None) for keyword in node.keywords) and len(node.args) < num_positional:
        yield _found(function, "network-no-timeout", node, f"`{name}` waits for ever")


def _judged(function: Function, calls: list[ast.Call]) -> Iterator[LintFinding]:
    """A prompt with the output in it, in a function that asks a judge."""
    if not any(ASKS_JUDGE.search(call_name(node)) for node in calls):
        return
    quoted = _quoted_names(function)
    for node in ast.walk(function.node):
        holes = list(_holes(node))
        raw = [hole for hole in holes if function.is_output(hole) and not _is_quoted(hole, quoted)]
        if raw and _is_prompt(node):
            shown = ast.unparse(raw[0])
            yield _found(function, "judge-raw-output", node, f"`{shown}` goes into the judge's prompt unquoted")
            return


def _tested(function: Function, calls: list[ast.Call]) -> Iterator[LintFinding]:
    """Output and tests in one program, or written side by side, in a function that runs something."""
    names = [call_name(node) for node in calls]
    runs = [
        n for n in names if n in ("exec", "eval", "os.system") or RUNS_PROCESS.search(n) or RUNS_ELSEWHERE.search(n)
    ]
    if not runs:
        return
    for node in ast.walk(function.node):
        parts = list(_parts(node))
        if any(function.is_output(part) for part in parts) and any(_is_test(function, part) for part in parts):
            yield _found(function, "tests-overwritable", node, "the output and its tests are joined into one program")
            return
    writes = [node for node in calls if WRITES.search(call_name(node))]
    of_output = [node for node in writes if any(function.is_output(arg) for arg in node.args)]
    of_tests = [node for node in writes if any(_is_test(function, arg) for arg in [*node.args, node.func])]
    apart = [node for node in of_tests if node not in of_output]
    if of_output and apart:
        yield _found(function, "tests-overwritable", apart[0], "the tests are written to where the output's code runs")
        return
    executed = [node for node in calls if call_name(node) == "exec" and node.args]
    if any(function.is_output(n.args[0]) for n in executed) and any(_is_test(function, n.args[0]) for n in executed):
        yield _found(
            function, "tests-overwritable", executed[-1], "the tests run in the namespace of the output's code"
        )


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """What is put together: the operands of +, the fields of an f-string, of a join, of a format."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        for side in (node.left, node.right):
            yield from _parts(side) if isinstance(side, ast.BinOp) else [side]
    elif isinstance(node, ast.JoinedStr):
        yield from (value.value for value in node.values if isinstance(value, ast.FormattedValue))
    elif isinstance(node, ast.Call) and call_name(node).endswith(".join") and node.args:
        inner = node.args[0]
        yield from inner.elts if isinstance(inner, ast.List | ast.Tuple) else []
    elif isinstance(node, ast.Call) and call_name(node).endswith(".format"):
        yield from [*node.args, *(keyword.value for keyword in node.keywords)]


def _is_test(function: Function, node: ast.AST) -> bool:
    """Whether an expression names tests; what also holds output is not asked."""
    if function.is_output(node) and not isinstance(node, ast.Attribute):
        return False
    for each in ast.walk(node):
        word = each.id if isinstance(each, ast.Name) else each.attr if isinstance(each, ast.Attribute) else None
        if isinstance(each, ast.Constant) and isinstance(each.value, str) and len(each.value) < 60:
            word = each.value.rpartition("/")[2].partition(".")[0]
        if word and TEST_NAME.search(word.lower()):
            return True
    return False


def _holes(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.JoinedStr):
        yield from (v.value for v in node.values if isinstance(v, ast.FormattedValue) and v.conversion != ord("r"))
    elif isinstance(node, ast.Call) and call_name(node).endswith(".format"):
        yield from [*node.args, *(keyword.value for keyword in node.keywords)]
    elif isinstance(node, ast.Call) and call_name(node).endswith(".replace") and len(node.args) == 2:
        yield node.args[1]
    elif (
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant | ast.Name)
    ):
        yield from node.right.elts if isinstance(node.right, ast.Tuple) else [node.right]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from (node.left, node.right)


def _is_prompt(node: ast.AST) -> bool:
    """An addition counts only when a text is one of the sides: other sums are numbers."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = (node.left, node.right)
        return any(isinstance(s, ast.Constant) and isinstance(s.value, str) for s in sides) or any(
            isinstance(s, ast.Name) and ("PROMPT" in s.id.upper() or "TEMPLATE" in s.id.upper()) for s in sides
        )
    return True


def _quoted_names(function: Function) -> set[str]:
    found = set()
    for node in ast.walk(function.node):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and QUOTES.search(call_name(node.value)):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def _is_quoted(node: ast.AST, quoted: set[str]) -> bool:
    if isinstance(node, ast.Call) and QUOTES.search(call_name(node)):
        return True
    return isinstance(node, ast.Name) and node.id in quoted


def _found(function: Function, rule: str, node: ast.AST, what: str) -> LintFinding:
    return function.module.finding(RULES[rule], getattr(node, "lineno", function.node.lineno), what)
