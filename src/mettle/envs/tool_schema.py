"""Tools described to a model: a function's signature and docstring as a JSON schema.

Parts: `tool_of`. pydantic is imported by the first tool and not before. Invariant: as in the schemas that verifiers
produced, every parameter is required and no other is allowed, unless a parameter is an open dict, which a strict schema
cannot express; such a tool is not strict.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, get_type_hints

from mettle.records.messages import Tool

_SECTION = re.compile(r"^\s*(args|arguments|parameters|params)\s*:\s*$", re.IGNORECASE)
_OTHER_SECTION = re.compile(r"^\s*(returns?|yields?|raises?|examples?|notes?|attributes)\s*:\s*$", re.IGNORECASE)
_GOOGLE = re.compile(r"^(\s+)\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_SPHINX = re.compile(r"^\s*:param\s+(?:[^:]*\s)?(\w+)\s*:\s*(.*)$")
_SPHINX_OTHER = re.compile(r"^\s*:(?:returns?|raises?|rtype|type)\b")


def tool_of(function: Callable[..., Any], args_to_skip: frozenset[str] = frozenset()) -> Tool:
    """The tool that calls `function`; parameters in `args_to_skip` are not shown to the model."""
    from pydantic import Field, create_model

    name = getattr(function, "__name__", type(function).__name__)
    description, parameter_docs = docstring_parts(inspect.getdoc(function) or "")
    hints = _hints(function)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in args_to_skip or parameter.name == "self":
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        default = ... if parameter.default is parameter.empty else parameter.default
        about = parameter_docs.get(parameter.name)
        fields[parameter.name] = (hints.get(parameter.name, Any), Field(default, description=about))
    schema = create_model(f"{name}_args", **fields).model_json_schema()
    is_strict = _make_strict(schema)
    return Tool(name=name, description=description, parameters=schema, strict=is_strict)


def docstring_parts(docstring: str) -> tuple[str, dict[str, str]]:
    """What a docstring says first, and what it says about each parameter (Google or Sphinx style)."""
    about: list[str] = []
    parameters: dict[str, str] = {}
    current: str | None = None
    in_section = is_over = False
    for line in docstring.splitlines():
        sphinx = _SPHINX.match(line)
        if _SECTION.match(line):
            in_section, current = True, None
        elif _OTHER_SECTION.match(line) or _SPHINX_OTHER.match(line):
            in_section, is_over, current = False, True, None
        elif sphinx:
            current = sphinx.group(1)
            parameters[current], is_over = sphinx.group(2).strip(), True
        elif in_section and (google := _GOOGLE.match(line)):
            current = google.group(2)
            parameters[current] = google.group(3).strip()
        elif current and line.strip():
            parameters[current] = f"{parameters[current]} {line.strip()}".strip()
        elif not in_section and not is_over:
            about.append(line)
    return "\n".join(about).strip(), parameters


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except (NameError, TypeError):
        return {}


def _make_strict(schema: Any) -> bool:
    """Close every object in place; False when one has to stay open."""
    if isinstance(schema, list):
        return all([_make_strict(item) for item in schema])
    if not isinstance(schema, dict):
        return True
    is_strict = True
    if schema.get("type") == "object":
        if "properties" in schema or "additionalProperties" not in schema:
            schema["additionalProperties"] = False
            schema.setdefault("properties", {})
            schema["required"] = list(schema["properties"])
        else:
            is_strict = False
    if schema.get("default", ...) is None:
        del schema["default"]
    return all([_make_strict(value) for value in schema.values()]) and is_strict


convert_func_to_tool_def = tool_of
