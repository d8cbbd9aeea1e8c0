"""Tool schemas are those of verifiers, key for key; what it refused is described too."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, TypedDict

import pytest

import mettle.envs as vf
from mettle.envs.docstrings import docstring_parts

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from described import ALL  # noqa: E402

SCHEMAS: dict[str, Any] = json.loads((HERE / "tool_schemas.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", [name for name, schema in SCHEMAS.items() if schema is not None])
def test_a_function_is_described_as_verifiers_describes_it(name):
    assert json.dumps(dict(vf.convert_func_to_tool_def(ALL[name]))) == json.dumps(SCHEMAS[name])


@pytest.mark.parametrize("name", [name for name, schema in SCHEMAS.items() if schema is None])
def test_what_verifiers_refused_is_described(name):
    tool = vf.convert_func_to_tool_def(ALL[name])
    assert tool.parameters["additionalProperties"] is False
    assert tool.parameters["required"] == list(tool.parameters["properties"])


def test_a_schema_is_strict_unless_an_object_stays_open():
    assert vf.convert_func_to_tool_def(ALL["g02"]).strict is False
    assert vf.convert_func_to_tool_def(ALL["g03"]).strict is True


class Person(TypedDict, total=False):
    name: str


def test_a_typed_dict_of_typing_is_described_on_every_python():
    def greet(person: Person, others: list[Person]) -> str:
        """Greet."""
        return ""

    parameters = vf.convert_func_to_tool_def(greet).parameters
    assert parameters["$defs"]["Person"]["properties"]["name"]["type"] == "string"


def test_a_type_that_json_does_not_know_is_no_reason_to_refuse_a_hidden_argument():
    class Connection:
        pass

    def ask(query: str, connection: Connection) -> str:
        """Ask."""
        return ""

    env = type("Env", (vf.StatefulToolEnv,), {"update_tool_args": lambda self, *a, **k: {}})(
        dataset=[{"question": "q"}]
    )
    env.add_tool(ask, args_to_skip=["connection"])
    assert list(env.tool_defs[0].parameters["properties"]) == ["query"]


def test_the_nested_form_is_that_of_chat_completions():
    tool = vf.convert_func_to_oai_tool(ALL["f01"])
    assert tool["type"] == "function"
    assert tool["function"]["name"] == "f01"


@pytest.mark.parametrize(
    ("docstring", "description", "parameters"),
    [
        ("", "", {}),
        ("Only this.", "Only this.", {}),
        ("Do.\n\n    Args:\n        a (int): One.\n            More.\n", "Do.", {"a": "One.\nMore."}),
        ("Do.\n\n    :param str a: One\n    :returns: x\n", "Do.", {"a": "One"}),
        ("Do.\n\n    Parameters\n    ----------\n    a : int\n        One.\n", "Do.", {"a": "One."}),
    ],
)
def test_a_docstring_comes_apart(docstring, description, parameters):
    assert docstring_parts(docstring) == (description, parameters)
