"""Token in, token out: the exact ids that were sampled, extended turn by turn.

Parts: `PromptRenderer` (what is asked of the text-to-ids side), `TokenClient`, `generate_fields`.
Invariants: a later turn's prompt begins with the very ids that were sampled before, or, where the chat template rewrote
an earlier turn, is rendered whole (the rollout then branches, which `ResponseTokens` shows as a shorter shared prefix);
text is never re-tokenized to guess what was sampled. Context is read from the rollout's own trajectory, so nothing
is kept here that could leak or go stale.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mettle.clients.base import Client, request_fields
from mettle.clients.config import ClientConfig, transport_for
from mettle.clients.errors import InvalidModelResponseError, ModelError
from mettle.clients.group import GroupMember, group_members
from mettle.clients.transport import ModelTransport
from mettle.errors import EnvironmentFault
from mettle.records.experts import read_experts
from mettle.records.messages import (
    Messages,
    Response,
    ResponseMessage,
    ResponseTokens,
    Tool,
    ToolCall,
    Usage,
    messages_from,
)
from mettle.records.sampling import other_distribution

PATH = "/generate"
GENERATE_FIELDS = frozenset(
    {"max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos"}
    | {"presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"}
)
MEANINGLESS_FIELDS = frozenset({"n", "logprobs", "top_logprobs", "return_token_ids", "stream", "skip_special_tokens"})


class ReadTurn(Protocol):
    """What a completion's ids say."""

    @property
    def content(self) -> str | None: ...
    @property
    def reasoning_content(self) -> str | None: ...
    @property
    def tool_calls(self) -> Any: ...


class PromptRenderer(Protocol):
    """Messages to ids and back; see `mettle.clients.renderer`."""

    def render(self, messages: Any, tools: Any = None, *, add_generation_prompt: bool = True) -> list[int]: ...
    def extend(self, context_ids: Any, context_messages: Any, messages: Any, tools: Any = None) -> list[int] | None: ...
    def parse(self, completion_ids: Any, tools: Any = None) -> ReadTurn: ...


class TokenClient(Client):
    """A client of `/v1/generate` that renders and parses on its own side.

    What it samples with `trains_at` set is trained, at that temperature: a call that would sample from another
    distribution than the policy's, whoever asked for that, is refused.
    """

    def __init__(
        self,
        base_url: ClientConfig | str,
        renderer: PromptRenderer,
        *,
        transport: ModelTransport | None = None,
        trains_at: float | None = None,
    ) -> None:
        self.transport = transport or transport_for(base_url)
        self.renderer = renderer
        self.trains_at = trains_at

    def for_group(self, size: int) -> list[GroupMember]:
        """A client for each of the `size` rollouts of one group; identical first turns share one request."""
        return group_members(self, size)

    def request_fields(self, sampling_args: Mapping[str, Any] | None) -> dict[str, Any]:
        """Sampling arguments as fields of a request."""
        return generate_fields(sampling_args)

    async def get_response(
        self,
        prompt: Messages,
        model: str,
        sampling_args: Mapping[str, Any] | None = None,
        tools: list[Tool] | None = None,
        *,
        state: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> Response:
        """One turn. With `state`, the ids of its trajectory are extended where `prompt` continues them."""
        prompt_ids, _is_first = self.prompt_ids(prompt, tools, state)
        return (await self.generate(prompt_ids, model, generate_fields(sampling_args), 1, tools))[0]

    async def close(self) -> None:
        """Close connections."""
        await self.transport.close()

    def prompt_ids(
        self, prompt: Messages, tools: list[Tool] | None, state: Mapping[str, Any] | None
    ) -> tuple[list[int], bool]:
        """The ids of `prompt`, and whether no earlier turn was there to extend."""
        prompt = messages_from(prompt)
        trajectory = (state.get("trajectory") if state is not None else None) or []
        for step in reversed(trajectory):
            tokens = step.get("tokens")
            context = [*step["prompt"], *step["completion"]]
            if not isinstance(tokens, ResponseTokens) or tokens.was_cut or prompt[: len(context)] != context:
                continue
            if (step.get("extras") or {}).get("tool_defs", tools) != tools:
                continue  # the ids show the model other tools than it is offered now
            extended = self.renderer.extend(tokens.context_ids(), context, prompt, tools)
            if extended is not None:
                return extended, False
            break
        return self.renderer.render(prompt, tools), not trajectory

    async def generate(
        self, prompt_ids: Sequence[int], model: str, fields: Mapping[str, Any], n: int, tools: list[Tool] | None
    ) -> list[Response]:
        """`n` completions of the same ids, each as a response.

        Raises: EnvironmentFault for a call that is to be trained and would not sample from the policy's distribution.
        """
        if self.trains_at is not None and (other := other_distribution(fields, self.trains_at)):
            asked = ", ".join(f"{name} = {value}" for name, value in sorted(other.items()))
            raise EnvironmentFault(
                f"the environment sampled with {asked}, but what is trained must be drawn from the policy's own "
                f"distribution at the run's temperature ({self.trains_at:g}), or the importance ratio is biased: "
                "leave that out of its sampling arguments"
            )
        # The age of what is trained is counted by the versions of its tokens; an evaluation is of one version.
        lag = {"may_lag": True} if self.trains_at is not None else {}
        body = {"prompt_ids": list(prompt_ids), "n": n, "model": model, **fields, **lag}
        raw = await self.transport.post(PATH, body)
        url = self.transport.base_url + PATH
        choices = raw.get("choices")
        if not isinstance(choices, list) or len(choices) != n:
            raise InvalidModelResponseError(f"POST {url}: asked for {n} choices, got {str(choices)[:200]}")
        read: dict[tuple[int, ...], ReadTurn] = {}
        return [self._response(raw, choice, prompt_ids, tools, url, read) for choice in choices]

    def _response(
        self,
        raw: Mapping[str, Any],
        choice: Mapping[str, Any],
        prompt_ids: Sequence[int],
        tools: Any,
        url: str,
        read: dict[tuple[int, ...], ReadTurn],
    ) -> Response:
        """`read` has what other choices of the answer say, of which many say the same."""
        try:
            ids, logprobs, finish_reason = choice["token_ids"], choice["logprobs"], choice["finish_reason"]
            versions = choice["versions"]
            experts = read_experts(choice.get("experts"), len(ids))
            tokens = ResponseTokens(
                prompt_ids, ids, logprobs, versions,
                completion_experts=experts, replica=str(choice.get("replica") or ""),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InvalidModelResponseError(f"POST {url}: a choice that cannot be read: {error!r}") from error
        if not len(ids) == len(logprobs) == len(versions):
            lengths = f"{len(ids)} ids, {len(logprobs)} logprobs, {len(versions)} versions"
            raise InvalidModelResponseError(f"POST {url}: a choice with {lengths}")
        if finish_reason == "abort":
            raise ModelError(f"POST {url}: the engine aborted the request after {len(ids)} tokens")
        parsed = read.get(said := tuple(ids))
        if parsed is None:
            parsed = self.renderer.parse(ids, tools)
            if not parsed.tool_calls:  # a call has a name of its own
                read[said] = parsed
        return Response(
            id=raw.get("request_id") or "",
            created=int(time.time()),
            model=raw.get("model") or "",
            usage=Usage(
                prompt_tokens=len(prompt_ids),
                completion_tokens=len(ids),
                reasoning_tokens=0,
                cached_tokens=0,
                total_tokens=len(prompt_ids) + len(ids),
            ),
            message=ResponseMessage(
                content=parsed.content,
                reasoning_content=parsed.reasoning_content,
                tool_calls=_tool_calls(parsed),
                finish_reason="tool_calls" if parsed.tool_calls and finish_reason == "stop" else finish_reason,
                is_truncated=finish_reason == "length",
                tokens=tokens,
            ),
        )


def generate_fields(sampling_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """Sampling arguments as `/v1/generate` knows them.

    Raises: ModelError for an argument that would change what is sampled and that the endpoint does not know.
    """
    fields = request_fields(sampling_args)
    if "max_completion_tokens" in fields:
        fields.setdefault("max_tokens", fields.pop("max_completion_tokens"))
        fields.pop("max_completion_tokens", None)
    unknown = sorted(set(fields) - GENERATE_FIELDS - MEANINGLESS_FIELDS)
    if unknown:
        raise ModelError(f"sampling arguments {unknown} are unknown to {PATH}; it knows {sorted(GENERATE_FIELDS)}")
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    return {key: value for key, value in fields.items() if key in GENERATE_FIELDS}


def _tool_calls(parsed: ReadTurn) -> list[ToolCall] | None:
    calls = [ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in parsed.tool_calls or ()]
    return calls or None
