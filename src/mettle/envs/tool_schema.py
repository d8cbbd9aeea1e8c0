"""Tools described to a model: a function's signature and docstring as a JSON schema.

Parts: `tool_of`, `convert_func_to_tool_def` (its verifiers name), `convert_func_to_oai_tool` (nested, as chat
completions has it), `is_valid_tool_content_parts`. pydantic is imported by the first tool and not before. Invariant:
the schema is, key for key and in the same order, the one that verifiers made of the same function; where verifiers
refused a function (an open dict, `**kwargs`, a `typing.TypedDict`) there is a schema, strict only if it can be.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from mettle.envs.docstrings import docstring_parts
from mettle.records.messages import Tool

CONTENT_PARTS = frozenset({"text", "image_url"})


def tool_of(function: Callable[..., Any], args_to_skip: frozenset[str] = frozenset()) -> Tool:
    """The tool that calls `function`; parameters in `args_to_skip` are not shown to the model."""
    from pydantic import create_model

    name = getattr(function, "__name__", None) or type(function).__name__
    docstring = docstring_parts(inspect.getdoc(function) or "")
    hints = _hints(function)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        hidden = parameter.name in args_to_skip or parameter.name == "self"
        if not hidden and parameter.kind is not parameter.VAR_KEYWORD:
            fields[parameter.name] = _field(parameter, hints, docstring.parameters)
    schema = create_model(f"{name}_args", __config__=_config(), **fields).model_json_schema()
    is_strict = _make_strict(schema, schema)
    return Tool(name=name, description=docstring.description, parameters=schema, strict=is_strict)


def convert_func_to_oai_tool(function: Callable[..., Any]) -> dict[str, Any]:
    """The tool as chat completions wants it."""
    return {"type": "function", "function": dict(tool_of(function))}


def is_valid_tool_content_parts(value: Any) -> bool:
    """Whether a tool's result is a list of content parts, to be passed on as it is."""
    return isinstance(value, list) and all(
        isinstance(part, dict) and part.get("type") in CONTENT_PARTS for part in value
    )


def _config() -> Any:
    from pydantic import ConfigDict

    return ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())


def _field(parameter: inspect.Parameter, hints: dict[str, Any], described: dict[str, str]) -> tuple[Any, Any]:
    """A pydantic field. What the docstring says of a parameter goes before what its annotation says."""
    from pydantic import Field
    from pydantic.fields import FieldInfo

    annotation: Any = hints.get(parameter.name, Any)
    about = described.get(parameter.name) or _note(annotation)
    if parameter.kind is parameter.VAR_POSITIONAL:
        return types.GenericAlias(list, (annotation,)), Field(default_factory=list, description=about)
    if isinstance(parameter.default, FieldInfo):
        about = about or parameter.default.description
        return annotation, FieldInfo.merge_field_infos(parameter.default, description=about)
    default = ... if parameter.default is parameter.empty else parameter.default
    return annotation, Field(default, description=about) if about else Field(default)


def _note(annotation: Any) -> str | None:
    """The text in `Annotated[type, "text"]`."""
    if get_origin(annotation) is not Annotated:
        return None
    return next((note for note in get_args(annotation)[1:] if isinstance(note, str)), None)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError):
        hints = {}
    return {name: _acceptable(hint) for name, hint in hints.items()}


def _acceptable(hint: Any) -> Any:
    """`hint` with each `typing.TypedDict` in it, which pydantic refuses before Python 3.12, as one that it takes."""
    if sys.version_info < (3, 12) and is_typeddict(hint):
        import typing_extensions

        members = get_type_hints(hint, include_extras=True)
        fields: dict[str, Any] = {name: _acceptable(kind) for name, kind in members.items()}
        for name in hint.__optional_keys__:
            fields[name] = typing_extensions.NotRequired[fields[name]]
        make: Any = typing_extensions.TypedDict
        made = make(hint.__name__, fields)
        made.__doc__ = hint.__doc__
        return made
    arguments = get_args(hint)
    if not arguments or get_origin(hint) is Annotated:
        return hint
    replaced = tuple(_acceptable(argument) for argument in arguments)
    return hint if replaced == arguments else _rebuilt(hint, replaced)


def _rebuilt(hint: Any, arguments: tuple[Any, ...]) -> Any:
    if isinstance(hint, types.UnionType):
        return Union[arguments]  # noqa: UP007
    return hint.copy_with(arguments) if hasattr(hint, "copy_with") else get_origin(hint)[arguments]


def _make_strict(schema: Any, root: dict[str, Any]) -> bool:
    """Close every object in place; False when one has to stay open."""
    if isinstance(schema, list):
        return all([_make_strict(item, root) for item in schema])
    if not isinstance(schema, dict):
        return True
    is_strict = True
    if schema.get("type") == "object":
        if "properties" in schema or "additionalProperties" not in schema:
            schema["additionalProperties"] = False
            schema.setdefault("properties", {})
            schema["required"] = list(schema["properties"])
        else:
            is_strict = not schema["additionalProperties"]
    if schema.get("default", ...) is None:
        del schema["default"]
    is_strict = all([_make_strict(value, root) for value in list(schema.values())]) and is_strict
    if "$ref" in schema and len(schema) > 1:
        _write_out(schema, root)
    return is_strict


def _write_out(schema: dict[str, Any], root: dict[str, Any]) -> None:
    """Replace a reference that has something beside it by what it refers to; a strict schema allows no siblings."""
    target: Any = root
    for key in schema.pop("$ref").removeprefix("#/").split("/"):
        target = target[key]
    schema.update({**target, **schema})


convert_func_to_tool_def = tool_of
