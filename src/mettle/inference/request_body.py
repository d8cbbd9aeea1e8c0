"""Reading a JSON request: each field once, with its type and range, and a complaint that names it.

No pydantic: this is the hot path. A field that the OpenAI API knows and this server would silently not honour is
refused; one that nobody knows is ignored, as client libraries send extras of their own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from mettle.inference.api_errors import bad_request
from mettle.records.sampling import SamplingParams

MAX_STOP_STRINGS = 16
MAX_TOP_LOGPROBS = 20

# Fields that change what is sampled, with the value at which they change nothing.
_NOT_SERVED: Mapping[str, Sequence[Any]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "guided_json": (),
    "structured_outputs": (),
}


async def read_body(request: web.Request) -> Body:
    """The request's JSON object."""
    try:
        value = json.loads(await request.read())
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object")
    return Body(value)


class Body:
    """A JSON object with readers that check. A field that is null counts as left out."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields

    def get(self, name: str) -> Any:
        """The field as it is, or None."""
        return self.fields.get(name)

    def integer(self, name: str, default: int | None = None, *, low: int, high: int | None = None) -> int | None:
        """A whole number within bounds."""
        value = self.fields.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise bad_request(f"{name} must be an integer, not {value!r}", name)
        if value < low or (high is not None and value > high):
            bounds = f"at least {low}" if high is None else f"from {low} to {high}"
            raise bad_request(f"{name} must be {bounds}, not {value}", name)
        return value

    def number(self, name: str, default: float, *, low: float, high: float, is_above: bool = False) -> float:
        """A finite number within bounds; `is_above` leaves out the lower one."""
        value = self.fields.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise bad_request(f"{name} must be a number, not {value!r}", name)
        if value < low or value > high or (is_above and value == low):
            raise bad_request(f"{name} must be {'above' if is_above else 'from'} {low} to {high}, not {value}", name)
        return float(value)

    def boolean(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.fields.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise bad_request(f"{name} must be true or false, not {value!r}", name)
        return value

    def text(self, name: str) -> str | None:
        """A string."""
        value = self.fields.get(name)
        if value is not None and not isinstance(value, str):
            raise bad_request(f"{name} must be a string", name)
        return value

    def token_ids(self, name: str) -> list[int]:
        """A list of token ids; required."""
        value: Any = self.fields.get(name)
        if not is_token_ids(value):
            raise bad_request(f"{name} must be a list of token ids", name)
        ids: list[int] = value
        return ids

    def objects(self, name: str) -> list[dict[str, Any]] | None:
        """A list of JSON objects."""
        value = self.fields.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise bad_request(f"{name} must be a list of objects", name)
        return value

    def stop_strings(self) -> tuple[str, ...]:
        """`stop`: one string or several."""
        value = self.fields.get("stop")
        stops: Any = [value] if isinstance(value, str) else (value or [])
        if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
            raise bad_request("stop must be a string or a list of strings, none of them empty", "stop")
        if len(stops) > MAX_STOP_STRINGS:
            raise bad_request(f"stop takes at most {MAX_STOP_STRINGS} strings, not {len(stops)}", "stop")
        return tuple(stops)

    def sampling(self, max_tokens: int | None) -> SamplingParams:
        """The sampling fields, which all generating routes share."""
        self.refuse_what_is_not_served()
        top_k = self.integer("top_k", -1, low=-1)
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.number("temperature", 1.0, low=0.0, high=100.0),
            top_p=self.number("top_p", 1.0, low=0.0, high=1.0, is_above=True),
            top_k=-1 if top_k is None else top_k,
            min_p=self.number("min_p", 0.0, low=0.0, high=1.0),
            seed=self.integer("seed", low=-(2**63), high=2**64 - 1),
            stop=self.stop_strings(),
            stop_token_ids=tuple(self.token_ids("stop_token_ids")) if self.get("stop_token_ids") is not None else (),
            ignore_eos=self.boolean("ignore_eos"),
        )

    def wants_usage(self) -> bool:
        """`stream_options.include_usage`: whether a stream ends with the token counts."""
        options = self.fields.get("stream_options")
        return isinstance(options, dict) and bool(options.get("include_usage"))

    def refuse_what_is_not_served(self) -> None:
        """Refuse fields that would be quietly without effect."""
        for name, neutral in _NOT_SERVED.items():
            value = self.fields.get(name)
            if value is not None and value not in neutral:
                raise bad_request(f"{name} is not supported by this server; leave it out", name)


def is_token_ids(value: object) -> bool:
    """True for a list of whole numbers."""
    return isinstance(value, list) and all(type(item) is int for item in value)
