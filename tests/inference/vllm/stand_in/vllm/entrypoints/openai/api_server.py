"""Stands in for vLLM's server in the daily tests: its command line and the shapes of its routes, on a Unix socket.

The model behind it is real (the embedded engine), so that log-probabilities and updates mean something. As in vLLM,
a reload proves nothing, tokens are named by `index_generate-tokens-NAME-suffix` to the worker, and a stop token is in
the tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from mettle.inference.bridge import Bridge
from mettle.inference.config import InferenceConfig
from mettle.inference.engine.embedded import EmbeddedEngine, start_engine
from mettle.inference.engine.protocol import (
    Generation,
    GenerationRequest,
    RequestRefused,
    TokenEvent,
    WeightsRejected,
)
from mettle.inference.engine.weights import fuse, read_state
from mettle.records.sampling import Constraint, SamplingParams
from mettle.web.streams import sse


class Server:
    """The routes. `counts` are the tokens that each running choice has, written in the engine's thread."""

    def __init__(self, engine: EmbeddedEngine, *, has_lora: bool) -> None:
        self.engine, self.has_lora = engine, has_lora
        self.bridge = Bridge(engine)
        self.counts: dict[str, int] = {}
        self.version = "default"
        self.num_reloads = 0

    async def health(self, _: Request) -> Response:
        return Response()

    async def pause(self, request: Request) -> Response:
        mode = "keep" if request.query_params["mode"] == "keep" else "drain"
        await asyncio.to_thread(self.engine.pause, mode)
        return JSONResponse({"status": "paused"})

    async def resume(self, _: Request) -> Response:
        await asyncio.to_thread(self.engine.resume)
        return JSONResponse({"status": "resumed"})

    async def rpc(self, request: Request) -> Response:
        body = await request.json()
        assert body["method"] == "mettle_reload"
        counts = await asyncio.to_thread(self._reload, Path(body["args"][0]))
        return JSONResponse({"results": [{"counts": counts, "repacked": 1}]})

    def _reload(self, folder: Path) -> dict[str, int]:
        engine, self.num_reloads = self.engine, self.num_reloads + 1
        current = engine._scheduler.decoder
        weights = fuse(current.shape, read_state(folder), torch.device("cpu"), torch.float32)

        def exchange() -> dict[str, int]:
            engine._scheduler.swap(current.with_weights(weights), self.num_reloads)
            return dict(self.counts)

        return engine._call(exchange)

    async def load_adapter(self, request: Request) -> Response:
        body = await request.json()
        if not self.has_lora:  # the route is not there then
            return JSONResponse({"detail": "Not Found"}, status_code=404)
        try:
            await asyncio.to_thread(self.engine.load_adapter, body["lora_name"], Path(body["lora_path"]))
        except WeightsRejected as error:
            return JSONResponse({"error": {"message": str(error)}}, status_code=400)
        return Response("Success: LoRA adapter added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        await asyncio.to_thread(self.engine.unload_adapter, (await request.json())["lora_name"])
        return Response("Success: LoRA adapter removed successfully.")

    async def set_version(self, request: Request) -> Response:
        self.version = (await request.json())["new_version"]
        return JSONResponse({"success": True, "new_version": self.version})

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        sampling = body["sampling_params"]
        adapter = "" if body["model"] == "policy" else body["model"]
        if adapter and adapter not in {found.name for found in self.engine.status().adapters}:
            return JSONResponse({"error": {"message": f"no model {body['model']}", "code": 404}}, status_code=404)
        asked = GenerationRequest(
            request_id=f"generate-tokens-{body.get('request_id', id(body))}-1a2b3c4d",
            prompt_ids=body["token_ids"],
            params=SamplingParams(
                sampling["max_tokens"], sampling["temperature"], sampling.get("top_p", 1.0), sampling.get("top_k", -1),
                sampling.get("min_p", 0.0), sampling.get("seed"), (), tuple(sampling.get("stop_token_ids", ())),
                sampling.get("ignore_eos", False), sampling.get("presence_penalty", 0.0),
                sampling.get("frequency_penalty", 0.0), sampling.get("repetition_penalty", 1.0),
                tuple((int(token), bias) for token, bias in (sampling.get("logit_bias") or {}).items()),
                _constraint(sampling.get("structured_outputs")),
            ),
            n=sampling.get("n", 1),
            prompt_logprobs=sampling.get("prompt_logprobs") is not None,
            top_logprobs=sampling.get("logprobs") or sampling.get("prompt_logprobs") or 0,
            has_token_events=bool(body.get("stream")),
            adapter=adapter,
        )  # fmt: skip
        if not body.get("stream"):
            return JSONResponse(_whole(asked, await self.bridge.generate(asked)))
        names = [f"{i}_{asked.request_id}" if asked.n > 1 else asked.request_id for i in range(asked.n)]
        told = _Counting(self.bridge, self.counts, names)
        self.counts.update(dict.fromkeys(names, 0))
        try:
            self.engine.submit(asked, told)
        except RequestRefused as error:
            for name in names:
                del self.counts[name]
            return JSONResponse({"error": {"message": str(error), "code": 400}}, status_code=400)
        return StreamingResponse(self._stream(asked, told, names), media_type="text/event-stream")

    async def _stream(self, asked: GenerationRequest, told: _Counting, names: list[str]) -> AsyncIterator[bytes]:
        try:
            async for event in told.events(asked):
                if isinstance(event, TokenEvent) and event.token_id is not None:
                    yield sse({"choices": [_chunk(event)]})
            yield sse("[DONE]")
        finally:
            for name in names:
                self.counts.pop(name, None)


class _Counting:
    """Counts tokens at the moment at which they are sampled, as the worker of vLLM does."""

    def __init__(self, bridge: Bridge, counts: dict[str, int], names: list[str]) -> None:
        self._bridge, self._counts, self._names = bridge, counts, names
        self._items: asyncio.Queue[Any] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def on_token(self, event: TokenEvent) -> None:
        name = self._names[event.choice]
        if event.token_id is not None and name in self._counts:
            self._counts[name] += 1
        self._put(event)

    def on_finish(self, generation: Generation) -> None:
        self._put(None)

    def on_failure(self, error: Exception) -> None:
        self._put(None)

    def _put(self, item: Any) -> None:
        self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    async def events(self, asked: GenerationRequest) -> AsyncIterator[TokenEvent]:
        try:
            while (item := await self._items.get()) is not None:
                yield item
        finally:
            self._bridge.engine.abort(asked.request_id)


def _constraint(asked: dict[str, Any] | None) -> Constraint | None:
    if asked is None:
        return None
    ((kind, value),) = asked.items()
    return Constraint(kind, "" if kind == "json_object" else value if isinstance(value, str) else json.dumps(value))


def _chunk(event: TokenEvent) -> dict[str, Any]:
    top = [{"token_id": other.token_id, "logprob": max(other.logprob, -9999.0)} for other in event.top_logprobs]
    entry = {"token_id": event.token_id, "logprob": event.logprob, "rank": None, "top_logprobs": top}
    return {
        "index": event.choice, "finish_reason": event.finish_reason, "stop_reason": None,
        "token_ids": [event.token_id], "logprobs": {"content": [entry]}, "weight_versions": None,
    }  # fmt: skip


def _whole(asked: GenerationRequest, generation: Generation) -> dict[str, Any]:
    tops = generation.prompt_top_logprobs or [[] for _ in asked.prompt_ids]
    scored = [
        None
        if value is None
        else {
            str(each): {"logprob": logprob, "rank": 1, "decoded_token": None}
            for each, logprob in [(token, value), *((other.token_id, other.logprob) for other in top)]
        }
        for token, value, top in zip(asked.prompt_ids, generation.prompt_logprobs or (), tops, strict=True)
    ]
    return {"choices": [{"index": 0, "token_ids": generation.choices[0].token_ids}], "prompt_logprobs": scored}


async def serve(arguments: argparse.Namespace) -> None:
    config = InferenceConfig(
        model=arguments.model, max_slots=arguments.max_num_seqs, max_queue=1000,
        max_model_len=arguments.max_model_len, seed=arguments.seed,
    )  # fmt: skip
    ends = json.loads((arguments.model / "generation_config.json").read_text())["eos_token_id"]
    server = Server(start_engine(config, eos_token_ids=(ends,)), has_lora=arguments.enable_lora)
    routes = [
        Route("/health", server.health),
        Route("/pause", server.pause, methods=["POST"]),
        Route("/resume", server.resume, methods=["POST"]),
        Route("/collective_rpc", server.rpc, methods=["POST"]),
        Route("/update_weight_version", server.set_version, methods=["POST"]),
        Route("/v1/load_lora_adapter", server.load_adapter, methods=["POST"]),
        Route("/v1/unload_lora_adapter", server.unload_adapter, methods=["POST"]),
        Route("/inference/v1/generate", server.generate, methods=["POST"]),
    ]
    await uvicorn.Server(uvicorn.Config(Starlette(routes=routes), uds=str(arguments.uds), log_level="warning")).serve()


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--uds"):
        parser.add_argument(name, type=Path, required=True)
    for name in ("--max-model-len", "--max-num-seqs", "--seed", "--max-logprobs"):
        parser.add_argument(name, type=int)
    for name in ("--max-lora-rank", "--max-loras", "--max-cpu-loras"):
        parser.add_argument(name, type=int)
    parser.add_argument("--lora-target-modules", nargs="+")
    for name in (
        "--served-model-name",
        "--dtype",
        "--worker-extension-cls",
        "--logprobs-mode",
        "--structured-outputs-config",
    ):
        parser.add_argument(name, required=True)
    for name in ("--enable-scale-out", "--enable-lora"):
        parser.add_argument(name, action="store_true")
    arguments = parser.parse_args()
    assert threading.current_thread() is threading.main_thread()
    asyncio.run(serve(arguments))


if __name__ == "__main__":
    main()
