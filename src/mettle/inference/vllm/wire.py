"""vLLM's routes: token ids in and out, pausing, weights. One `VllmWire` belongs to one event loop.

Raises, everywhere: EngineLost when nothing answers, RequestRefused for status 400, ServiceError for another one.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import aiohttp

from mettle.errors import MettleError, ServiceError
from mettle.inference.client import message_of
from mettle.inference.engine.protocol import EngineLost, PauseMode, RequestRefused, TokenLogprob
from mettle.inference.remote import server_events
from mettle.inference.vllm.launch import SERVED_NAME
from mettle.records.sampling import SamplingParams

ASK_TIMEOUT_S: Final = 30.0
UPDATE_TIMEOUT_S: Final = 600.0
_BASE: Final = "http://localhost"
_LOST: Final = (aiohttp.ClientError, TimeoutError, OSError)


class VllmWire:
    """The server behind a Unix socket."""

    def __init__(self, socket: Path) -> None:
        self._session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(socket), limit=0))

    async def close(self) -> None:
        """Let go of connections."""
        await self._session.close()

    async def answers(self) -> bool:
        """Whether requests are taken."""
        try:
            async with self._session.get(f"{_BASE}/health", timeout=aiohttp.ClientTimeout(total=5)) as response:
                return response.status == 200
        except _LOST:
            return False

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """The chunks of a request. Closing the generator ends the request over there."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=ASK_TIMEOUT_S)
        try:
            async with self._session.post(f"{_BASE}/inference/v1/generate", json=body, timeout=timeout) as response:
                if response.status != 200:
                    raise refusal(response.status, await response.json(content_type=None))
                async with aclosing(server_events(response)) as events:
                    async for data in events:
                        if data == "[DONE]":
                            return
                        chunk = json.loads(data)
                        if "error" in chunk:  # after a status of 200, for vLLM looks at a grammar after that
                            raise refusal(_code_of(chunk), chunk)
                        yield chunk
        except _LOST as error:
            raise EngineLost(f"vLLM does not answer: {type(error).__name__}: {error}") from error

    async def score(
        self, prompt_ids: Sequence[int], model: str = SERVED_NAME, top: int = 0
    ) -> tuple[list[float | None], list[list[TokenLogprob]]]:
        """Log-probabilities of a prompt's tokens at temperature 1, computed anew and not from a cache, and those of the
        `top` likeliest at each place."""
        if len(prompt_ids) < 2:
            return [None] * len(prompt_ids), [[] for _ in prompt_ids]
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top, "detokenize": False}
        body = {"model": model, "token_ids": list(prompt_ids), "sampling_params": sampling}
        answer = await self._ask("POST", "/inference/v1/generate", {**body, "cache_salt": uuid.uuid4().hex})
        found = answer["prompt_logprobs"]
        places = range(1, len(prompt_ids))
        scores = [None, *(float(found[i][str(prompt_ids[i])]["logprob"]) for i in places)]
        tops = [[TokenLogprob(int(token), float(told["logprob"])) for token, told in found[i].items()] for i in places]
        return scores, [[], *(sorted(each, key=lambda one: -one.logprob)[:top] for each in tops)]

    async def pause(self, mode: PauseMode) -> None:
        """Returns once nothing is sampled any more."""
        word = "keep" if mode == "keep" else "wait"
        await self._ask("POST", f"/pause?mode={word}&clear_cache=false", None, UPDATE_TIMEOUT_S)

    async def resume(self) -> None:
        """Go on."""
        await self._ask("POST", "/resume", None)

    async def reload(self, folder: Path, version: int) -> dict[str, int]:
        """Read other weights in place; the number of tokens that each request known there had."""
        answer = await self._ask(
            "POST", "/collective_rpc", {"method": "mettle_reload", "args": [str(folder)]}, UPDATE_TIMEOUT_S
        )
        await self._ask("POST", "/update_weight_version", {"new_version": str(version)})
        counts: dict[str, int] = {}
        for worker in answer["results"]:
            for name, count in worker["counts"].items():
                counts[name] = max(count, counts.get(name, 0))
        return counts

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Serve a LoRA adapter under a model name; one of that name is replaced."""
        body = {"lora_name": name, "lora_path": str(folder), "load_inplace": True}
        await self._ask("POST", "/v1/load_lora_adapter", body)

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter."""
        await self._ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, limit_s: float = ASK_TIMEOUT_S
    ) -> dict[str, Any]:
        try:
            timeout = aiohttp.ClientTimeout(total=limit_s)
            async with self._session.request(method, _BASE + path, json=body, timeout=timeout) as response:
                text = await response.text()
                try:
                    answer = json.loads(text)
                except ValueError:
                    answer = {"message": text}
                answer = answer if isinstance(answer, dict) else {"message": answer}
                if response.status != 200:
                    raise refusal(response.status, answer)
                return answer
        except _LOST as error:
            raise EngineLost(f"vLLM does not answer: {type(error).__name__}: {error}") from error


def sampling_body(
    params: SamplingParams, *, max_tokens: int, stop_token_ids: Sequence[int], n: int, seed: int | None, top: int
) -> dict[str, Any]:
    """vLLM's own sampling parameters. Which tokens end a choice is said here alone: no default of a model joins in."""
    return {
        "n": n,
        "max_tokens": max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "logit_bias": {str(token): bias for token, bias in params.logit_bias} or None,
        "structured_outputs": None if params.constraint is None else params.constraint.wire(),
        "seed": seed,
        "ignore_eos": True,
        "stop_token_ids": list(stop_token_ids),
        "logprobs": top,
        "detokenize": False,
    }


def _code_of(body: Mapping[str, Any]) -> int:
    error = body["error"]
    code = error.get("code") if isinstance(error, Mapping) else None
    return code if type(code) is int else 500


def refusal(status: int, body: Mapping[str, Any]) -> MettleError:
    """What a status that is not 200 means, in one line."""
    message = f"vLLM: {' '.join(message_of(body).split())}"
    return RequestRefused(message, "request") if status == 400 else ServiceError(f"{message} (status {status})")
