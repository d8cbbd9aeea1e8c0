"""The embedded engine: a scheduler, and the one thread that steps it.

Other threads put commands into an inbox; the engine's thread takes them between two steps, so nothing below needs a
lock. An update is read, fused and proven in the caller's thread beside the weights in use, and only the exchange of a
few references waits for the end of a step. An update that is an adapter of the base costs an adapter's memory, not a
model's: it is added to its rows, and the one before it goes with the exchange. Invariant: a version is served only
after its canary was reproduced.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch
from torch import Tensor

from mettle.errors import MettleError, ServiceError, UserError
from mettle.inference.config import InferenceConfig
from mettle.inference.engine.architecture import read_config
from mettle.inference.engine.decoder import Decoder
from mettle.inference.engine.decoders import make_decoder
from mettle.inference.engine.grammars import Grammars
from mettle.inference.engine.limits import Limits
from mettle.inference.engine.protocol import (
    EngineBusy,
    EngineStatus,
    EngineStopped,
    GenerationRequest,
    PauseMode,
    SamplingEngine,
    TokenListener,
    WeightsRejected,
    WeightUpdate,
)
from mettle.inference.engine.published import PublishedPolicy, load_adapter, load_published, prove
from mettle.inference.engine.scheduler import Scheduler
from mettle.inference.engine.sequences import CountedListener, DecodeText
from mettle.inference.engine.weights import inference_threads, read_state, tokens_of_a_step
from mettle.processes.host import release_freed_memory
from mettle.records.versions import CanaryCheck

logger = logging.getLogger(__name__)

_DEFAULT_MODEL_LEN = 4096
_MANY_WEIGHTS = 2**24
"""Reading so many leaves memory behind that is worth giving back."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Result = TypeVar("Result")


class EmbeddedEngine:
    """Serves one model from a thread of its own, until `close`; what the methods promise is in `SamplingEngine`."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        max_queue: int,
        canary_tolerance: float = 1e-3,
        num_threads: int = 1,
        base: Path | None = None,
        is_of_base: bool = False,
        on_death: Callable[[MettleError], None] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._max_outstanding = scheduler.limits.max_slots + max_queue
        self._canary_tolerance = canary_tolerance
        self._num_threads = num_threads
        self._base = base
        self._is_of_base = is_of_base  # the decoder in use has the weights of `base`
        self._on_death = on_death
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._count_lock = threading.Lock()
        self._update_lock = threading.Lock()
        self._num_outstanding = 0
        self._num_updates = 0
        self._num_rejected = 0
        self._is_admitting = True
        self._is_stepping = True
        self._is_closing = False
        self._drained: list[Future[None]] = []
        self._death: MettleError | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest, listener: TokenListener) -> None:
        """Take a request; the queue is bounded in choices."""
        self._scheduler.check(request)
        with self._count_lock:
            self._check_alive()
            if self._num_outstanding + request.n > self._max_outstanding:
                raise EngineBusy(
                    f"{self._num_outstanding} sequences run or wait and no more are taken; try again later"
                )
            self._num_outstanding += request.n
            counted = CountedListener(listener, lambda: self._count_out(request.n))
            self._inbox.put(lambda: self._scheduler.add(request, counted))

    def abort(self, request_id: str) -> None:
        """End a request between two steps."""
        self._inbox.put(lambda: self._scheduler.abort(request_id))

    def update_weights(self, folder: Path, version: int) -> WeightUpdate:
        """Read, fuse, prove, and exchange. One update at a time."""
        with self._update_lock:
            started = time.perf_counter()
            try:
                self._check_alive()
                policy, canary = self._prepare(folder, version)
            except WeightsRejected as error:
                self._num_rejected += 1
                logger.warning("refused weights", extra={"version": version, "reason": str(error)})
                raise
            loaded = time.perf_counter()
            self._call(lambda: self._scheduler.swap(policy.decoder, version, policy.adapter))
            self._is_of_base = policy.is_base
            swapped = time.perf_counter()
            if policy.adapter is None and policy.decoder.num_parameters >= _MANY_WEIGHTS:
                release_freed_memory()
            self._num_updates += 1
            update = WeightUpdate(version, (loaded - started) * 1e3, (swapped - loaded) * 1e3, canary)
            logger.info(
                "serving version",
                extra={"version": version, "load_ms": update.load_ms, "swap_ms": update.swap_ms},
            )
            return update

    def load_adapter(self, name: str, folder: Path, version: int | None = None) -> WeightUpdate:
        """Read, fit, prove, and serve. One update at a time."""
        with self._update_lock:
            started = time.perf_counter()
            scheduler = self._scheduler
            try:
                self._check_alive()
                scheduler.adapters.check_room(name)
                next_version = scheduler.adapters.next_version(name)
                with inference_threads(self._num_threads):
                    found = load_adapter(folder, version, next_version, scheduler.decoder, self._base)
                    canary = prove(scheduler.decoder, folder, found.version, self._canary_tolerance, found.weights)
            except WeightsRejected as error:
                self._num_rejected += 1
                logger.warning("refused adapter", extra={"adapter": name, "version": version, "reason": str(error)})
                raise
            loaded = time.perf_counter()
            self._call(lambda: scheduler.put_adapter(name, folder, found.version, found.weights))
            swapped = time.perf_counter()
            self._num_updates += 1
            update = WeightUpdate(found.version, (loaded - started) * 1e3, (swapped - loaded) * 1e3, canary)
            about = {"adapter": name, "version": found.version, "rank": found.weights.rank, "load_ms": update.load_ms}
            logger.info("serving adapter", extra=about)
            return update

    def unload_adapter(self, name: str) -> None:
        """Between two steps."""
        with self._update_lock:
            self._call(lambda: self._scheduler.remove_adapter(name))
            logger.info("no longer serving adapter", extra={"adapter": name})

    def pause(self, mode: PauseMode) -> None:
        """Stop at the next step's end, or when what runs has finished; what waits goes on waiting."""
        drained: Future[None] = Future()

        def stop() -> None:
            self._is_admitting = False
            if mode == "keep" or not self._scheduler.has_begun:
                self._is_stepping = False
                drained.set_result(None)
            else:
                self._drained.append(drained)

        self._call(stop)
        drained.result()

    def resume(self) -> None:
        """Go on."""

        def go_on() -> None:
            self._is_admitting = self._is_stepping = True
            self._release_drained()

        self._call(go_on)

    def status(self) -> EngineStatus:
        """Counts as of now; they are read without stopping the engine."""
        scheduler, totals = self._scheduler, self._scheduler.totals
        num_running = scheduler.num_running
        return EngineStatus(
            version=scheduler.version,
            num_running=num_running,
            num_waiting=max(0, self._num_outstanding - num_running),
            is_paused=not self._is_stepping,
            is_alive=self._death is None and not self._is_closing,
            max_slots=scheduler.limits.max_slots,
            max_model_len=scheduler.limits.max_model_len,
            vocab_size=scheduler.decoder.shape.vocab_size,
            total_prompt_tokens=totals.prompt_tokens,
            total_sampled_tokens=totals.sampled_tokens,
            total_requests=totals.requests,
            total_aborted=totals.aborted,
            total_steps=totals.steps,
            total_updates=self._num_updates,
            total_rejected_updates=self._num_rejected,
            kv_bytes=scheduler.memory.used,
            kv_budget_bytes=scheduler.memory.budget,
            total_prefix_hit_tokens=totals.prefix_hit_tokens,
            total_preempted=totals.preempted,
            adapters=scheduler.adapters.statuses(),
            forward_of=scheduler.decoder.forward_of,
            dtype=str(scheduler.decoder.dtype).removeprefix("torch."),
            canary_tolerance=self._canary_tolerance,
        )

    def close(self) -> None:
        """Abort what is left and end the thread."""
        if self._thread.is_alive():
            self._inbox.put(self._begin_closing)
            self._thread.join()

    def _prepare(self, folder: Path, version: int) -> tuple[PublishedPolicy, CanaryCheck | None]:
        current = self._scheduler.decoder
        base_decoder = current if self._is_of_base else None
        with inference_threads(self._num_threads):
            policy = load_published(folder, version, self._base, current.with_state, base_decoder)
            return policy, prove(policy.decoder, folder, version, self._canary_tolerance, policy.adapter)

    def _run(self) -> None:
        try:
            with inference_threads(self._num_threads):
                while not self._is_closing:
                    self._obey(is_waiting=not self._is_stepping or not self._has_work())
                    if self._is_stepping and not self._is_closing:
                        self._scheduler.step(is_admitting=self._is_admitting)
                        self._notice_drained()
        except Exception as error:
            # The boundary of the thread: nobody above would see the error, and every listener must hear of it.
            logger.exception("the engine failed")
            self._die(ServiceError(f"the engine failed: {type(error).__name__}: {error}"))
        else:
            self._scheduler.abort_all()
            self._die(EngineStopped("the engine is shutting down"))

    def _has_work(self) -> bool:
        scheduler = self._scheduler
        return scheduler.has_begun or bool(self._is_admitting and scheduler.num_waiting)

    def _obey(self, *, is_waiting: bool) -> None:
        """Carry out the commands in the inbox, waiting for the first one when there is nothing else to do."""
        try:
            command = self._inbox.get(block=is_waiting)
            while True:
                command()
                command = self._inbox.get_nowait()
        except Empty:
            return

    def _notice_drained(self) -> None:
        if self._drained and not self._scheduler.has_begun:
            self._is_stepping = False
            self._release_drained()

    def _release_drained(self) -> None:
        while self._drained:
            self._drained.pop().set_result(None)

    def _call(self, do: Callable[[], Result]) -> Result:
        """Do something in the engine's thread between two steps, and wait for it."""
        done: Future[Result] = Future()

        def command() -> None:
            try:
                done.set_result(do())
            except Exception as error:  # it belongs to the caller, not to the engine's loop
                done.set_exception(error)

        with self._count_lock:
            self._check_alive()
            self._inbox.put(command)
        return done.result()

    def _begin_closing(self) -> None:
        self._is_closing = True

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineStopped(str(self._death))
        if self._is_closing:
            raise EngineStopped("the engine is shutting down")

    def _die(self, error: MettleError) -> None:
        with self._count_lock:
            self._death = error
        self._scheduler.fail_all(error)
        self._obey_last()
        self._release_drained()
        if self._on_death is not None and isinstance(error, ServiceError):
            self._on_death(error)

    def _obey_last(self) -> None:
        # Requests that were taken but never seen by the scheduler still owe their listeners an answer.
        self._obey(is_waiting=False)
        self._scheduler.fail_all(self._death or EngineStopped("the engine is shutting down"))

    def _count_out(self, num_choices: int) -> None:
        with self._count_lock:
            self._num_outstanding -= num_choices


def start_engine(
    config: InferenceConfig,
    *,
    eos_token_ids: tuple[int, ...] = (),
    decode_text: DecodeText | None = None,
    on_death: Callable[[MettleError], None] | None = None,
) -> EmbeddedEngine:
    """Load the configured model and start serving it.

    Raises: UserError when the model is missing, not served, or the device is not there.
    """
    device = _device(config.device)
    dtype = _DTYPES[config.dtype]
    with inference_threads(config.threads):
        policy = _first_policy(config, device, dtype)
    release_freed_memory()
    decoder = policy.decoder
    positions = decoder.shape.max_positions
    wanted = config.max_model_len or min(positions, _DEFAULT_MODEL_LEN)
    if config.record_experts and (decoder.forward_of != "mettle" or decoder.shape.experts is None):
        raise UserError(
            "record_experts is for mixtures of experts that the engine computes itself (qwen3_moe); leave it out"
        )
    if wanted > positions:
        raise UserError(f"max_model_len is {wanted}, the model has {positions} positions")
    limits = Limits(
        config.max_slots,
        wanted,
        config.max_prefill_tokens or tokens_of_a_step(decoder.num_parameters),
        config.kv_cache_bytes,
        config.kv_cache_share,
        config.max_adapters,
        config.max_adapter_versions,
        config.reuse_sampled,
        config.record_experts,
    )
    scheduler = Scheduler(
        decoder,
        limits,
        version=config.version,
        eos_token_ids=eos_token_ids,
        decode_text=decode_text,
        seed=config.seed,
        policy_adapter=policy.adapter,
        grammars=Grammars(config.model / "tokenizer.json", decoder.shape.vocab_size, eos_token_ids),
    )
    _log_memory(scheduler)
    return EmbeddedEngine(
        scheduler,
        max_queue=config.max_queue,
        canary_tolerance=config.tolerance,
        num_threads=config.threads,
        base=config.model,
        is_of_base=policy.is_base,
        on_death=on_death,
    )


def _log_memory(scheduler: Scheduler) -> None:
    memory = scheduler.memory
    about = {
        "kv_budget_bytes": memory.budget,
        "kv_token_bytes": memory.sizes.token_bytes,
        "kv_budget_tokens": memory.budget // memory.sizes.token_bytes,
        "max_model_len": scheduler.limits.max_model_len,
        "max_prefill_tokens": scheduler.limits.max_prefill_tokens,
    }
    logger.info("memory for keys and values", extra=about)


def _first_policy(config: InferenceConfig, device: torch.device, dtype: torch.dtype) -> PublishedPolicy:
    about = read_config(config.model)

    def make(state: Mapping[str, Tensor]) -> Decoder:
        try:
            return make_decoder(about, state, device, dtype, config.max_model_len or _DEFAULT_MODEL_LEN)
        except UserError as error:
            raise UserError(f"{config.model}: {error}") from error

    if config.weights is None:
        return PublishedPolicy(make(read_state(config.model)), is_base=True)
    try:
        policy = load_published(config.weights, config.version, config.model, make)
        prove(policy.decoder, config.weights, config.version, config.tolerance, policy.adapter)
    except WeightsRejected as error:
        raise UserError(f"{config.weights} cannot be started from: {error}") from error
    return policy


def _device(name: str) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise UserError("device is 'cuda' and torch finds no GPU here; use 'cpu' or 'auto'")
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")


_KEEPS_THE_PROTOCOL: type[SamplingEngine] = EmbeddedEngine
