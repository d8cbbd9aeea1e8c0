"""What a name in a config stands for: something of ours, a plug-in's entry point, or `module:attribute`.

Parts: `Plugins`, and `check_options` (what a config says of one, against its arguments). Our own stand in
`pyproject.toml` as entry points like anybody's, and in `built_in` too, so that a checkout that was never installed has
them. Invariant: listing the names imports nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from mettle.config.complaints import nearest

_AS_WRITTEN = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
"""A config's values have types already: "yes" is no boolean and 3.5 no integer."""


@dataclass(frozen=True, slots=True)
class Plugins:
    """The plug-ins of one kind. `group` is their entry point group, `noun` what one is called in messages."""

    group: str
    noun: str
    built_in: Mapping[str, str]
    """Name to `module:attribute`."""

    def names(self) -> list[str]:
        """The names that are registered."""
        return sorted({*self.built_in, *(point.name for point in entry_points(group=self.group))})

    def find(self, name: str) -> Any:
        """What `name` stands for, imported now. Raises: ValueError when there is no such thing."""
        place = self.built_in.get(name)
        if place is None:
            places = [point.value for point in entry_points(group=self.group) if point.name == name]
            place = places[0] if places else name
        module, colon, attribute = place.partition(":")
        if not colon:
            known = ", ".join(self.names())
            raise ValueError(f"there is no {self.noun} {name!r}; there are {known}, and any as 'module:attribute'")
        try:
            return getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{self.noun} {name!r} cannot be imported: {error}") from error


def check_options(name: str, factory: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Hold `options` against the arguments of `factory`, which `name` stands for, and against their annotations.

    An annotation that is missing or cannot be resolved asks for nothing. Raises: ValueError naming the option.
    """
    parameters = inspect.signature(factory).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    known = [key for key, parameter in parameters.items() if parameter.kind in _NAMED]
    for key, value in options.items():
        if key in known:
            _check_value(name, key, value, _annotations(factory).get(key, Any))
        elif not takes_any:
            guess = nearest(key, known)
            hint = f"did you mean {guess!r}? " if guess else ""
            raise ValueError(f"{name} takes no option {key!r}; {hint}it takes {', '.join(known) or 'none'}")
    missing = [key for key in known if parameters[key].default is inspect.Parameter.empty and key not in options]
    if missing:
        raise ValueError(f"{name} wants the option {missing[0]!r}, which has no default")


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _annotations(factory: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
    except (NameError, TypeError):  # it names what its module imports for the type checker alone
        return {}


def _check_value(name: str, key: str, value: Any, annotation: Any) -> None:
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(annotation, config=_AS_WRITTEN)
    except PydanticUserError:  # a model with rules of its own, or a type that says nothing of values
        return
    try:
        adapter.validate_python(value)
    except ValidationError as error:
        wanted = str(error.errors()[0]["msg"])
        raise ValueError(f"{key} = {value!r} of {name}: {wanted[0].lower()}{wanted[1:]}") from error
