"""What the routes are asked, each with its types and ranges.

pydantic reads the JSON and checks it in one pass, in less than half of the time that `json.loads` and checks by hand
take (`benchmarks/inference_http.py` has the routes' cost). A field that is null counts as left out. One that the OpenAI
API knows and this server would silently not honour is refused; one that nobody knows is ignored, as client libraries
send extras of their own.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from mettle.inference.engine.protocol import RequestRefused
from mettle.records.sampling import Constraint, ConstraintKind, SamplingParams

KINDS: Final[tuple[ConstraintKind, ...]] = get_args(ConstraintKind)
MAX_STOP_STRINGS: Final = 16
MAX_TOP_LOGPROBS: Final = 20


def _must_be(*neutral: Any) -> AfterValidator:
    """For a field that would change what is sampled: only values at which it changes nothing."""

    def check(value: Any) -> Any:
        if value is not None and value not in neutral:
            raise ValueError("not supported by this server; leave it out")
        return value

    return AfterValidator(check)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


TokenIds = list[int]
JsonObjects = list[dict[str, Any]]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
StopStrings = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOP_STRINGS)]


def _response_format(wanted: dict[str, Any] | None) -> dict[str, Any] | None:
    kind = (wanted or {}).get("type")
    if wanted is None or kind in ("text", "json_object"):
        return wanted
    if kind != "json_schema":
        raise ValueError("has type 'text', 'json_object' or 'json_schema'")
    schema = wanted["json_schema"].get("schema") if isinstance(wanted.get("json_schema"), dict) else None
    if not isinstance(schema, dict | bool):
        raise ValueError("of type 'json_schema' has the schema in json_schema.schema")
    return wanted


def _structured_outputs(wanted: dict[str, Any] | None) -> dict[str, Any] | None:
    given = {key: value for key, value in (wanted or {}).items() if value is not None and value is not False}
    if wanted is None:
        return None
    if len(given) != 1 or not set(given) <= set(KINDS):
        raise ValueError(f"has one of {', '.join(KINDS)}, and nothing else")
    ((kind, value),) = given.items()
    types: dict[str, tuple[type, ...]] = {"json": (dict, str, bool), "json_object": (bool,), "choice": (list,)}
    if not isinstance(value, types.get(kind, (str,))):
        raise ValueError(f"has a {kind} of another type")
    if isinstance(value, list) and not (value and all(isinstance(choice, str) and choice for choice in value)):
        raise ValueError("has a choice that is no list of texts")
    return given


def _of_format(wanted: dict[str, Any] | None) -> Constraint | None:
    match (wanted or {}).get("type"):
        case "json_object":
            return Constraint("json_object", field="response_format")
        case "json_schema":
            assert wanted is not None, "it has a type"
            return Constraint("json", json.dumps(wanted["json_schema"]["schema"]), "response_format")
    return None


def _of_structure(given: dict[str, Any] | None, field: str) -> list[Constraint]:
    return [_constraint(kind, value, field) for kind, value in (given or {}).items()]


def _constraint(kind: ConstraintKind | Any, value: Any, field: str) -> Constraint:
    if kind == "json_object":
        return Constraint("json_object", field=field)
    if kind == "json" and isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RequestRefused(f"{field}: the schema is not JSON: {error}", field) from error
    return Constraint(kind, value if isinstance(value, str) else json.dumps(value), field)


class RouteBody(BaseModel):
    """Any body. `model`, where it is given, must be the name that is served."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: Any = None


class StreamOptions(BaseModel):
    """What a stream tells beside its pieces: at its end, or with each piece (a field of vLLM's), the tokens used."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingBody(RouteBody):
    """The fields that all generating routes share."""

    n: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: Annotated[StopStrings | None, BeforeValidator(_as_list)] = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    frequency_penalty: float | None = Field(default=None, ge=-2, le=2, allow_inf_nan=False)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2, allow_inf_nan=False)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100, allow_inf_nan=False)
    logit_bias: dict[int, Bias] | None = None
    length_penalty: Annotated[Any, _must_be(1)] = None
    min_tokens: Annotated[Any, _must_be(0)] = None
    best_of: Annotated[Any, _must_be(1)] = None
    suffix: Annotated[Any, _must_be("")] = None
    use_beam_search: Annotated[Any, _must_be(False)] = None
    response_format: Annotated[dict[str, Any] | None, AfterValidator(_response_format)] = None
    structured_outputs: Annotated[dict[str, Any] | None, AfterValidator(_structured_outputs)] = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    def params(self, max_tokens: int | None) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=-1 if self.top_k is None else self.top_k,
            min_p=self.min_p or 0.0,
            seed=self.seed,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=tuple((self.logit_bias or {}).items()),
            constraint=self.constraint(),
        )

    def constraint(self) -> Constraint | None:
        """What the answer must keep to, by whichever field says it.

        Raises: RequestRefused when several do, or the text of a schema is no JSON.
        """
        found = [_of_format(self.response_format), *_of_structure(self.structured_outputs, "structured_outputs")]
        for kind in KINDS:
            if kind != "json_object" and (value := getattr(self, f"guided_{kind}")) is not None:
                found += _of_structure({kind: value}, f"guided_{kind}")
        asked = [constraint for constraint in found if constraint is not None]
        if len(asked) > 1:
            raise RequestRefused(f"{asked[0].field} and {asked[1].field} are two constraints; give one", asked[1].field)
        if asked and self.ignore_eos:
            raise RequestRefused("an answer that keeps to a grammar ends with it; leave ignore_eos out", "ignore_eos")
        return asked[0] if asked else None


class GenerateBody(SamplingBody):
    """`POST /v1/generate`."""

    prompt_ids: TokenIds
    max_tokens: int | None = Field(default=None, ge=0)
    prompt_logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    request_id: str | None = Field(default=None, min_length=8, max_length=64)
    seeds: list[Annotated[int, Field(ge=0, lt=2**64)]] | None = None
    may_lag: bool | None = None


def _with_roles(messages: JsonObjects) -> JsonObjects:
    for number, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise ValueError(f"message {number} has no role")
    return messages


def _own_settings(settings: dict[str, Any] | None) -> dict[str, Any] | None:
    if {"messages", "tools", "add_generation_prompt"} & set(settings or ()):
        raise ValueError("must be an object of the template's own settings")
    return settings


class ChatBody(SamplingBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[JsonObjects, Field(min_length=1), AfterValidator(_with_roles)]
    tools: JsonObjects | None = None
    tool_choice: Annotated[Any, _must_be("auto", "none")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, AfterValidator(_own_settings)] = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    return_token_ids: bool | None = None

    @property
    def has_tools(self) -> bool:
        """Whether tool calls are to be read from the answer."""
        return bool(self.tools) and self.tool_choice != "none"


def _prompts(value: Any) -> list[str | TokenIds]:
    """One prompt or several, each a text or token ids, as a list."""
    if isinstance(value, str) or (value and _is_token_ids(value)):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, a list of token ids, or a list of either")
    if not all(isinstance(prompt, str) or _is_token_ids(prompt) for prompt in value):
        raise ValueError("must hold strings or lists of token ids")
    return value


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


class CompletionBody(SamplingBody):
    """`POST /v1/completions`."""

    prompt: Annotated[Any, AfterValidator(_prompts)]
    max_tokens: int | None = Field(default=None, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None


class TokenizeBody(RouteBody):
    """`POST /tokenize`."""

    prompt: str | None = None
    messages: JsonObjects | None = None
    tools: JsonObjects | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(RouteBody):
    """`POST /detokenize`."""

    tokens: TokenIds
    skip_special_tokens: bool | None = None


# "@" is left for the version in a model's name, `NAME@v3`.
AdapterName = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^@\s]+$")]


class AbortBody(RouteBody):
    """`POST /v1/generate/abort`: the `request_id` that the request was sent with."""

    request_id: str


class WeightsBody(BaseModel):
    """`POST /admin/weights`: the number and the folder of published weights, of the model itself or of an adapter."""

    model_config = ConfigDict(strict=True)

    version: int = Field(ge=0)
    path: str = Field(min_length=1)
    adapter: AdapterName | None = None


class LoadAdapterBody(BaseModel):
    """`POST /v1/load_lora_adapter`: a PEFT folder and the model name under which it is served."""

    model_config = ConfigDict(strict=True)

    lora_name: AdapterName
    lora_path: str = Field(min_length=1)
    load_inplace: bool = False


class UnloadAdapterBody(BaseModel):
    """`POST /v1/unload_lora_adapter`."""

    model_config = ConfigDict(strict=True)

    lora_name: str


class PauseBody(BaseModel):
    """`POST /admin/pause`."""

    mode: Literal["keep", "drain"] | None = None
