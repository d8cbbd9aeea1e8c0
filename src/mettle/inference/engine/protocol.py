"""What an engine is: requests in, choices out, weights replaced in between. No torch here.

An engine runs in a thread of its own. `submit` and `abort` return at once and may be called from any thread; what
comes of a request is told to its listener, from the engine's thread, which a listener must not keep.
Invariant: after `submit` a listener hears exactly one `on_finish` or `on_failure`, and nothing after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mettle.errors import MettleError, ServiceError
from mettle.records.sampling import SamplingParams
from mettle.records.versions import CANARY_TOLERANCES, CanaryCheck

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["keep", "drain"]


class EngineBusy(MettleError):
    """The queue is full; the same request may be sent again later."""


class EngineStopped(MettleError):
    """The engine is shutting down, or failed and cannot go on."""


class EngineLost(ServiceError):
    """The engine died under a request, which is not to blame: another engine may take it."""


class RequestRefused(MettleError):
    """The request can never run here. `parameter` names the field at fault, `code` the OpenAI error code."""

    def __init__(self, message: str, parameter: str, code: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.code = code


class WeightsRejected(MettleError):
    """An update was refused and the weights served before are served still."""

    def __init__(self, message: str, canary: CanaryCheck | None = None) -> None:
        super().__init__(message)
        self.canary = canary


@dataclass(frozen=True, slots=True)
class Redraw:
    """The tokens of a prompt from `start` on are said to be choice `index` of a request with `seed`, at `temperature`.

    The engine draws again, with the noise that this choice has, and says how far each token is from what it draws.
    """

    seed: int
    index: int
    start: int
    temperature: float = 1.0


class RedrawnToken(NamedTuple):
    """`logprob` of the token at the temperature of the draw, and by how much its noisy score falls short of the best
    one: 0 for the token that is drawn, and no more than rounding does where two are as good as equal."""

    logprob: float
    shortfall: float


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """`n` choices for one prompt, which is computed once. `top_logprobs` asks for that many alternatives a token.

    `has_token_events` makes the listener hear of every token. `prompt_logprobs` are those of the policy itself, at
    temperature 1, with `top_logprobs` alternatives each. `max_tokens` 0 scores the prompt and samples nothing. `seeds`,
    one a choice, take the place of `params.seed`: choices that came together are then sampled as they would be one by
    one. `adapter` names the adapter that samples, none being the base; always its newest version, unless
    `adapter_version` pins one. `redraw` has the last tokens of the prompt drawn again. `may_lag`: whoever asks counts
    the age of tokens by their versions, so that an engine may sample it with weights that are a little older than the
    newest.
    """

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    n: int = 1
    prompt_logprobs: bool = False
    top_logprobs: int = 0
    has_token_events: bool = False
    seeds: tuple[int, ...] = ()
    adapter: str = ""
    adapter_version: int | None = None
    redraw: Redraw | None = None
    may_lag: bool = False


class TokenLogprob(NamedTuple):
    """An alternative at one position."""

    token_id: int
    logprob: float


@dataclass(slots=True)
class Choice:
    """One completion. All lists are as long as `token_ids`; `top_logprobs` is empty unless it was asked for.

    The token that ended the completion is in it, for it was sampled. `stop` is the stop string that ended it, if any.
    `experts` has, for each token, those that a mixture's routers chose when they predicted it, layer by layer; it is
    empty unless the engine records them. `replica` is the engine of several that sampled it, "" where there is one.
    """

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | None = None
    experts: list[NDArray[np.int16]] = field(default_factory=list)
    replica: str = ""


@dataclass(frozen=True, slots=True)
class Generation:
    """What came of a request. `prompt_logprobs[0]` is None and `prompt_top_logprobs[0]` is empty, for nothing precedes
    the first token. Alternatives are there if they were asked for, likeliest first; `redrawn` has the tokens from the
    start of the `redraw` on."""

    request_id: str
    num_prompt_tokens: int
    choices: tuple[Choice, ...]
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[list[TokenLogprob]] | None = None
    redrawn: list[RedrawnToken] | None = None


class TokenEvent(NamedTuple):
    """One sampled token of one choice, or the end of a choice that was aborted (then `token_id` is None)."""

    choice: int
    token_id: int | None
    logprob: float
    version: int
    top_logprobs: list[TokenLogprob]
    finish_reason: FinishReason | None
    stop: str | None


class TokenListener(Protocol):
    """Hears what comes of one request, from the engine's thread."""

    def on_token(self, event: TokenEvent) -> None:
        """A token was sampled; only when the request has token events."""

    def on_finish(self, generation: Generation) -> None:
        """All choices have ended."""

    def on_failure(self, error: MettleError) -> None:
        """The engine failed under the request."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """An update that is in force. `load_ms` was spent aside, `swap_ms` is how long the running requests waited."""

    version: int
    load_ms: float
    swap_ms: float
    canary: CanaryCheck | None

    @property
    def update_ms(self) -> float:
        """From the call to the version in force."""
        return self.load_ms + self.swap_ms


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    """An adapter that is served: where its newest version came from, and the versions that a request may pin."""

    name: str
    path: str
    rank: int
    versions: tuple[int, ...]

    @property
    def newest(self) -> int:
        """The version of requests that pin none."""
        return self.versions[-1]


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Where an engine stands. `num_running` and `num_waiting` count choices, the totals count since the start."""

    version: int
    num_running: int
    num_waiting: int
    is_paused: bool
    is_alive: bool
    max_slots: int
    max_model_len: int
    vocab_size: int
    total_prompt_tokens: int = 0
    total_sampled_tokens: int = 0
    total_requests: int = 0
    total_aborted: int = 0
    total_steps: int = 0
    total_updates: int = 0
    total_rejected_updates: int = 0
    total_preempted: int = 0
    total_prefix_hit_tokens: int = 0
    kv_bytes: int = 0
    kv_budget_bytes: int = 0
    adapters: tuple[AdapterStatus, ...] = ()
    forward_of: str = "mettle"
    dtype: str = "float32"
    canary_tolerance: float = CANARY_TOLERANCES["float32"]


class SamplingEngine(Protocol):
    """A policy that samples."""

    def submit(self, request: GenerationRequest, listener: TokenListener) -> None:
        """Take a request.

        Raises: RequestRefused, EngineBusy, EngineStopped; then the listener hears nothing.
        """

    def abort(self, request_id: str) -> None:
        """End a request's choices with what they have; unknown ids are ignored."""

    def update_weights(self, folder: Path, version: int) -> WeightUpdate:
        """Serve the published weights in `folder` as `version`; returns once they are served and proven. Blocks.

        Raises: WeightsRejected.
        """

    def load_adapter(self, name: str, folder: Path, version: int | None = None) -> WeightUpdate:
        """Serve the adapter in `folder` as the newest version of `name`; returns once it is served. Blocks.

        With a `version` the folder must be a publication of it. Without, it is any PEFT folder; one that says no
        version gets the next number.
        Raises: WeightsRejected.
        """

    def unload_adapter(self, name: str) -> None:
        """Take no more requests for an adapter. Those under way end under it. Blocks."""

    def pause(self, mode: PauseMode) -> None:
        """Stop sampling: at once, keeping what runs (`keep`), or when it has finished (`drain`). Blocks."""

    def resume(self) -> None:
        """Go on after `pause`."""

    def status(self) -> EngineStatus:
        """Where the engine stands, without waiting for it."""

    def close(self) -> None:
        """Stop. Requests that have not ended are aborted. Blocks."""
