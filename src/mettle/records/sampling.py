"""How tokens are drawn: the sampling parameters that every engine and client understands.

Parts: `SamplingParams`, `Constraint` (what a completion must keep to), `other_distribution` (which arguments of a
request would sample from another distribution).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

ConstraintKind = Literal["json", "json_object", "regex", "choice", "grammar"]

WHOLE: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({}, [], ()),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}
"""Arguments of a request that change the distribution, and the values at which each leaves it as it is."""


def other_distribution(fields: Mapping[str, Any], temperature: float | None = None) -> dict[str, Any]:
    """Those of a request's fields under which tokens would not be drawn from the policy's own distribution.

    `extra_body` counts as laid over the rest. With `temperature` any other temperature is one of them.
    """
    asked = {name: value for name, value in {**fields, **(fields.get("extra_body") or {})}.items() if value is not None}
    found = {name: asked[name] for name, whole in WHOLE.items() if name in asked and asked[name] not in whole}
    if temperature is not None and asked.get("temperature", 1.0) != temperature:
        found["temperature"] = asked.get("temperature", 1.0)
    return found


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a completion must keep to: `text` is a JSON schema, a regular expression, a JSON list of choices, or a Lark
    grammar, and nothing for `json_object`. `field` is the request's field that it came in."""

    kind: ConstraintKind
    text: str = ""
    field: str = "structured_outputs"

    def wire(self) -> dict[str, Any]:
        """The request's field `structured_outputs` that says the same."""
        match self.kind:
            case "json_object":
                return {"json_object": True}
            case "json" | "choice":
                return {self.kind: json.loads(self.text)}
        return {self.kind: self.text}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's sampling. Logprobs that come back are those of the distribution sampled from ("processed").

    `temperature` 0 is greedy. `top_p` 1, `top_k` -1 and `min_p` 0 leave the support whole, which training demands.
    Penalties and `logit_bias` (token ids and what is added to their logits) are those of the OpenAI API and, for
    repetition, of Hugging Face: 0, 0, 1 and none leave the logits as they are.
    `seed` makes a request repeatable; choice i of n draws from (seed, i). `constraint` cuts the support to what keeps
    to it.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    constraint: Constraint | None = None

    @property
    def is_truncating(self) -> bool:
        """True when the support is cut, so that the logprobs are no longer the policy's own."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def has_penalty(self) -> bool:
        """True when logits depend on the tokens that have occurred."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def is_the_policys(self) -> bool:
        """True when tokens are drawn from the policy's own distribution, but for the temperature."""
        return not (self.is_truncating or self.has_penalty or self.logit_bias or self.constraint)
