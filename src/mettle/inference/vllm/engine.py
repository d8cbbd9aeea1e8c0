"""vLLM as an engine: what `SamplingEngine` promises, kept over its server's routes.

Ends are decided here, by the same rules as the embedded engine's (`engine.sequences`): which tokens stop, stop strings,
the longest length. An update of whole weights pauses vLLM, reads them in place, and lets it go on; the tokens that come
then are held until prompt log-probabilities have reproduced the canary, and if they do not, the old weights are read
back and the requests that ran are failed. One of an adapter is loaded and proven beside what is served, and counts for
the requests that come then (`adapters`). Prefixes are cached under the version that computed them. Where vLLM has to
recompute keys and values because memory ran out (preemption), it does so under the new weights.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import numpy as np

from mettle.errors import MettleError, ServiceError, StorageError, UserError
from mettle.inference.config import InferenceConfig
from mettle.inference.conversations import Conversations
from mettle.inference.engine.limits import Limits, check_request
from mettle.inference.engine.protocol import (
    EngineLost,
    EngineStatus,
    GenerationRequest,
    PauseMode,
    RequestRefused,
    SamplingEngine,
    TokenListener,
    WeightsRejected,
    WeightUpdate,
)
from mettle.inference.engine.sequences import DecodeText, RunningRequest, RunningSequence
from mettle.inference.engine.served_adapters import ServedAdapters
from mettle.inference.vllm.adapters import VllmAdapters, VllmModel
from mettle.inference.vllm.launch import SERVED_NAME, VllmServer
from mettle.inference.vllm.spoken import SpokenChoice, alternatives, by_choice
from mettle.inference.vllm.wire import VllmWire, sampling_body
from mettle.records.versions import CanaryCheck
from mettle.storage.weights import Canary, read_canary, read_version

logger = logging.getLogger(__name__)

MAX_SEEDS: Final = 2**63
MAX_BIAS: Final = 100
"""vLLM cuts larger ones to this without a word."""


class VllmEngine:
    """One vLLM server, started with it and ended with it. Returns once it answers.

    Raises: UserError for settings that vLLM cannot keep, ServiceError when it does not start.
    """

    def __init__(
        self,
        config: InferenceConfig,
        *,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        decode_text: DecodeText | None = None,
        on_death: Callable[[MettleError], None] | None = None,
        log: Path | None = None,
    ) -> None:
        self._config, self._log = config, log
        self._limits = Limits(config.max_slots, max_model_len)
        self._vocab_size = vocab_size
        self._eos, self._decode_text, self._on_death = eos_token_ids, decode_text, on_death
        self._version, self._folder = config.version, config.weights or config.model
        self._loaded = config.version
        self._open = asyncio.Event()  # cleared while weights are exchanged: what is sent then has no version
        self._open.set()
        self._unproven: int | None = None
        self._proven = asyncio.Event()
        self._proven.set()
        self._updating = asyncio.Lock()
        self._spoken: set[SpokenChoice] = set()
        self._talks: set[asyncio.Task[Any]] = set()
        self._refused: set[asyncio.Task[Any]] = set()
        self._is_paused = self._is_dead = self._is_closing = False
        self._num_tokens = self._num_prompt_tokens = self._num_requests = 0
        self._num_updates = self._num_rejected = self._num_aborted = 0
        self._calls = Conversations("vllm-engine", self._converse, config.max_slots + config.max_queue)
        try:
            self._calls.call(self._start())
        except BaseException:
            self._calls.close(self._farewell)
            raise
        self._calls.spawn(self._watch())

    def submit(self, request: GenerationRequest, listener: TokenListener) -> None:
        """Take a request; one that asks for what vLLM is not asked to do here is refused."""
        check_request(request, self._limits, self._vocab_size, keeps_grammars=True)
        params = request.params
        if params.stop and self._decode_text is None:
            raise RequestRefused("stop strings need a tokenizer, and this engine has none", "stop")
        if any(abs(bias) > MAX_BIAS for _, bias in params.logit_bias):
            raise RequestRefused(f"vLLM takes biases from -{MAX_BIAS} to {MAX_BIAS}", "logit_bias")
        self._adapters.check(request)
        self._calls.take(request, listener)

    def abort(self, request_id: str) -> None:
        """End a request; vLLM ends it when its stream is closed."""
        self._calls.abort(request_id)

    def update_weights(self, folder: Path, version: int) -> WeightUpdate:
        """Read, exchange, prove. One update at a time."""
        try:
            update = self._calls.call(self._update(folder.resolve(), version))
        except WeightsRejected as error:
            self._num_rejected += 1
            logger.warning("refused weights", extra={"version": version, "reason": str(error)})
            raise
        self._num_updates += 1
        return update

    def load_adapter(self, name: str, folder: Path, version: int | None = None) -> WeightUpdate:
        """Have vLLM serve the adapter under a name for each version: a request goes on with the one it began with."""
        return self._calls.call(self._load_adapter(name, folder.resolve(), version))

    def unload_adapter(self, name: str) -> None:
        """Take no more requests for it."""
        self._calls.call(self._adapters.unload(name))

    def pause(self, mode: PauseMode) -> None:
        """Stop sampling."""
        self._calls.call(self._wire.pause(mode))
        self._is_paused = True

    def resume(self) -> None:
        """Go on."""
        self._calls.call(self._wire.resume())
        self._is_paused = False

    def status(self) -> EngineStatus:
        """What went through here."""
        outstanding = self._calls.num_outstanding
        running = min(len(self._spoken), outstanding)
        return EngineStatus(
            version=self._version,
            num_running=running,
            num_waiting=outstanding - running,
            is_paused=self._is_paused,
            is_alive=not (self._is_dead or self._is_closing),
            max_slots=self._limits.max_slots,
            max_model_len=self._limits.max_model_len,
            vocab_size=self._vocab_size,
            total_prompt_tokens=self._num_prompt_tokens,
            total_sampled_tokens=self._num_tokens,
            total_requests=self._num_requests,
            total_steps=self._num_tokens,  # progress, as far as it is seen from here
            total_updates=self._num_updates,
            total_rejected_updates=self._num_rejected,
            adapters=self._adapters.statuses(),
            dtype=self._config.dtype,
            canary_tolerance=self._config.tolerance,
        )

    def close(self) -> None:
        """Abort what is left and end the server."""
        self._is_closing = True
        self._calls.close(self._farewell)

    async def _start(self) -> None:
        # In the loop's thread, which lives as long as the engine: the child is tied to it.
        self._server = VllmServer(self._config, self._limits.max_model_len, self._log)
        self._wire = VllmWire(self._server.socket)
        served = ServedAdapters[str](self._config.max_adapters, self._config.max_adapter_versions)
        self._adapters = VllmAdapters(self._wire, self._config.model, served, self._check)
        await self._server.ready(self._wire.answers)
        if self._config.weights is not None:
            try:
                await self._begin_with(self._config.weights.resolve())
            except (MettleError, OSError, KeyError, ValueError) as error:
                raise UserError(f"{self._config.weights} cannot be started from: {error}") from error

    async def _begin_with(self, folder: Path) -> None:
        if read_version(folder).kind == "lora":
            await self._adapters.take_policy(folder, self._version)
            return
        await self._exchange(folder, self._version)
        await self._prove(read_canary(folder), self._version)

    async def _farewell(self) -> None:
        if hasattr(self, "_wire"):
            await self._wire.close()
        if hasattr(self, "_server"):
            await asyncio.to_thread(self._server.end)

    async def _watch(self) -> None:
        error = EngineLost(await self._server.died())
        self._is_dead = True
        self._calls.end(error)
        if self._on_death is not None:
            self._on_death(error)

    async def _converse(self, running: RunningRequest) -> None:
        request = running.request
        self._num_requests += 1
        self._num_prompt_tokens += len(request.prompt_ids)
        if request.prompt_logprobs:
            async with self._adapters.chosen(request, self._loaded) as model:
                scores, tops = await self._wire.score(request.prompt_ids, model.name, request.top_logprobs)
                running.prompt_logprobs = scores
                running.prompt_top_logprobs = tops if request.top_logprobs else None
        if request.params.max_tokens == 0:
            for choice in running.choices:
                running.end_choice(choice, "length")
        else:
            sequences = self._sequences(running)
            try:
                async with asyncio.TaskGroup() as group:
                    for part, seed in _parts(request, sequences):
                        group.create_task(self._send(running, part, seed))
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None  # one request, one reason
        running.finish()

    def _sequences(self, running: RunningRequest) -> list[RunningSequence]:
        params, prompt = running.request.params, running.request.prompt_ids
        room = self._limits.max_model_len - len(prompt)
        longest = room if params.max_tokens is None else min(params.max_tokens, room)
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(self._eos))
        return [RunningSequence(running, choice, longest, stops, None, self._decode_text) for choice in running.choices]

    async def _send(self, running: RunningRequest, part: list[RunningSequence], seed: int | None) -> None:
        await self._open.wait()
        async with self._adapters.chosen(running.request, self._loaded) as model:
            await self._speak(running, part, seed, model)

    async def _speak(
        self, running: RunningRequest, part: list[RunningSequence], seed: int | None, model: VllmModel
    ) -> None:
        """Some choices of a request, as one request of vLLM's."""
        request, name = running.request, f"mettle{uuid.uuid4().hex}"
        room = self._limits.max_model_len - len(request.prompt_ids)
        longest = room if request.params.max_tokens is None else min(request.params.max_tokens, room)
        body = {
            "request_id": name,
            "model": model.name,
            "token_ids": list(request.prompt_ids),
            "stream": True,
            "cache_salt": f"v{self._loaded}",
            "sampling_params": sampling_body(
                request.params, max_tokens=longest, stop_token_ids=sorted(part[0].stop_token_ids), n=len(part),
                seed=seed, top=request.top_logprobs,
            ),
        }  # fmt: skip
        spoken = [
            SpokenChoice(sequence, name, index, model.version, is_base=model.is_base)
            for index, sequence in enumerate(part)
        ]
        task = asyncio.current_task()
        assert task is not None, "a request is spoken in a task"
        self._spoken.update(spoken)
        self._talks.add(task)
        try:
            async with aclosing(self._wire.stream(body)) as chunks:
                async for chunk in chunks:
                    self._hear(chunk, spoken, request.top_logprobs)
                    if all(choice.sequence.has_ended for choice in spoken):
                        return  # closing the stream ends what vLLM goes on with
            await self._proven.wait()
            if not all(choice.sequence.has_ended for choice in spoken):
                raise EngineLost("vLLM ended a stream early")
        except asyncio.CancelledError:
            if task not in self._refused:
                raise
            raise EngineLost("sampled under weights that are not served any more; ask again") from None
        finally:
            self._spoken.difference_update(spoken)
            self._talks.discard(task)
            self._refused.discard(task)

    def _hear(self, chunk: dict[str, Any], spoken: list[SpokenChoice], num_top: int) -> None:
        for found in chunk["choices"]:
            choice = spoken[found["index"]]
            for entry in (found.get("logprobs") or {}).get("content") or ():
                self._num_tokens += 1
                choice.hear(entry["token_id"], entry["logprob"], alternatives(entry, num_top), self._unproven)
            if found.get("finish_reason") not in (None, "stop", "length"):
                raise EngineLost(f"vLLM ended a request by itself: {found['finish_reason']}")

    async def _update(self, folder: Path, version: int) -> WeightUpdate:
        async with self._updating:
            kind, canary = _published(folder, version)
            started = time.perf_counter()
            if kind == "lora":
                check = await self._adapters.take_policy(folder, version)
                self._version = version
                return WeightUpdate(version, (time.perf_counter() - started) * 1e3, 0.0, check)
            if self._adapters.is_policy:  # what runs under an adapter would go on over another base
                self._fail_what_runs()
                await self._adapters.drop_policy()
            self._unproven = version
            self._proven.clear()
            try:
                await self._exchange(folder, version)
                swapped = time.perf_counter()
                check = await self._prove(canary, version)
            except ServiceError as error:
                if isinstance(error, EngineLost):
                    raise
                await self._go_back()
                raise WeightsRejected(f"version {version} is not served: {error}") from error
            except WeightsRejected:
                await self._go_back()
                raise
            else:
                self._version, self._folder = version, folder
            finally:
                self._unproven = None
                for choice in list(self._spoken):
                    choice.release()
                self._proven.set()
            ended = time.perf_counter()
            return WeightUpdate(version, (ended - swapped) * 1e3, (swapped - started) * 1e3, check)

    async def _exchange(self, folder: Path, version: int) -> None:
        self._open.clear()
        try:
            await self._wire.pause("keep")
            counts = by_choice(await self._wire.reload(folder, version))
            for choice in self._spoken:
                choice.switch(version, counts)
            self._loaded = version
            await self._wire.resume()
        finally:
            self._open.set()

    async def _prove(self, canary: Canary | None, version: int) -> CanaryCheck | None:
        try:
            return await self._check(canary, version)
        finally:
            if self._is_paused:  # the canary had to be sampled past a pause that somebody asked for
                await self._wire.pause("keep")

    async def _load_adapter(self, name: str, folder: Path, version: int | None) -> WeightUpdate:
        async with self._updating:
            started = time.perf_counter()
            number, check = await self._adapters.load(name, folder, version)
            return WeightUpdate(number, (time.perf_counter() - started) * 1e3, 0.0, check)

    async def _check(self, canary: Canary | None, version: int, model: str = SERVED_NAME) -> CanaryCheck | None:
        if canary is None:
            return None
        differences = []
        for row, length in enumerate(canary.lengths):
            scored, _ = await self._wire.score(canary.token_ids[row, :length].tolist(), model)
            ours = np.array(scored[1:], dtype=np.float64)
            differences.append(np.abs(ours - canary.logprobs[row, 1:length].astype(np.float64)))
        apart = np.concatenate(differences) if differences else np.zeros(0)
        if not len(apart):
            raise WeightsRejected(f"the canary of version {version} holds no tokens to compare")
        check = CanaryCheck(version, float(apart.mean()), float(apart.max()), len(apart))
        if not check.mean_abs_diff <= self._config.tolerance:
            message = (
                f"version {version} is not served: vLLM's log-probabilities differ from the trainer's by "
                f"{check.mean_abs_diff:.3g} in the mean, more than the {self._config.tolerance:g} allowed"
            )
            raise WeightsRejected(message, check)
        return check

    async def _go_back(self) -> None:
        """Read the old weights back. What ran has tokens of the refused ones in its keys and values: it is failed."""
        self._fail_what_runs()
        await self._exchange(self._folder, self._version)

    def _fail_what_runs(self) -> None:
        for choice in self._spoken:
            choice.held.clear()
        self._refused.update(self._talks)
        for task in self._talks:
            task.cancel()


def _published(folder: Path, version: int) -> tuple[str, Canary | None]:
    """What kind of weights a publication of `version` holds, and its canary. Raises: WeightsRejected."""
    try:
        published = read_version(folder)
        if published.version != version:
            raise WeightsRejected(f"{folder} holds version {published.version}, not {version}")
        return published.kind, read_canary(folder)
    except (StorageError, OSError, KeyError, ValueError) as error:
        raise WeightsRejected(f"version {version} is not served: {error}") from error


def _parts(
    request: GenerationRequest, sequences: list[RunningSequence]
) -> list[tuple[list[RunningSequence], int | None]]:
    """Choices that vLLM is asked for together: all of them, or each alone where each has a seed."""
    if request.seeds:
        return [([sequence], _derived(seed, 0)) for sequence, seed in zip(sequences, request.seeds, strict=True)]
    if request.params.seed is not None:
        return [([sequence], _derived(request.params.seed, i)) for i, sequence in enumerate(sequences)]
    return [(sequences, None)]


def _derived(seed: int, index: int) -> int:
    """A seed of vLLM's own range for choice `index`."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:8], "big") % MAX_SEEDS


_KEEPS_THE_PROTOCOL: type[SamplingEngine] = VllmEngine
