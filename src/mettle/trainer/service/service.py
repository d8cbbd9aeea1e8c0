"""The service behind its routes: what a request is allowed, accepted as, and answered with.

Parts: `TrainingService`, `Waiters`. Invariants: a promise is given after the operation is in the database; what an
owner asks for is looked for among what is theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request

from mettle.errors import UserError
from mettle.trainer.service.access import REFUSAL, ROOT, HubOwners, Signer, TenantKeys
from mettle.trainer.service.bodies import SampleBody
from mettle.trainer.service.config import TrainServeConfig
from mettle.trainer.service.encryption import is_encrypted
from mettle.trainer.service.folders import WeightFolders
from mettle.trainer.service.records import Kind, Operation, Outcome, SavedWeights, TrainedModel
from mettle.trainer.service.samplers import SamplerPool
from mettle.trainer.service.sampling import SampleRunner
from mettle.trainer.service.store import Store
from mettle.trainer.service.worker import TrainingWorker
from mettle.web.doors import is_loopback
from mettle.web.problems import HttpError

logger = logging.getLogger(__name__)


class Waiters:
    """Coroutines that wait for outcomes; news may come from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: defaultdict[str, set[asyncio.Event]] = defaultdict(set)

    def tell(self, request_id: str) -> None:
        """There is an outcome."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._wake, request_id)

    async def wait(self, request_id: str, look: Callable[[], Outcome | None], limit_s: float) -> Outcome | None:
        """What `look` finds, waited for until it has ended or the limit has passed."""
        event = asyncio.Event()
        self._waiting[request_id].add(event)
        try:
            found = look()
            if found is not None and found.state == "waiting":
                try:
                    async with asyncio.timeout(limit_s):
                        await event.wait()
                except TimeoutError:
                    return found
                found = look()
            return found
        finally:
            self._waiting[request_id].discard(event)
            if not self._waiting[request_id]:
                del self._waiting[request_id]

    def _wake(self, request_id: str) -> None:
        for event in self._waiting.get(request_id, ()):
            event.set()


class TrainingService:
    """What all routes share."""

    def __init__(
        self,
        config: TrainServeConfig,
        store: Store,
        worker: TrainingWorker,
        pool: SamplerPool,
        waiters: Waiters,
        keys: TenantKeys | HubOwners,
        signer: Signer,
        weights: WeightFolders,
        *,
        max_length: int,
        is_for_others: bool = False,
    ) -> None:
        self.config, self.store, self.worker, self.pool = config, store, worker, pool
        self.runner: SampleRunner
        self.waiters, self.keys, self.signer, self.weights = waiters, keys, signer, weights
        self.max_length = max_length
        # A client on this machine can read the tokenizer where it is; its SDK cuts a path of two parts short.
        folder = str(config.base_model.resolve())
        is_here = not is_for_others and is_loopback(config.host) and folder.count("/") != 2 and ":" not in folder
        self.tokenizer_id = folder if is_here else None

    def owner(self, request: Request) -> str:
        """Who asks. Raises: HttpError 401."""
        return self.keys.owner(request.headers)

    def root(self, request: Request) -> str:
        """The address that clients know the service by."""
        told = self.keys.told(request.headers, ROOT)
        return told or f"{request.url.scheme}://{request.headers.get('host', '')}"

    def refusal(self, request: Request) -> str:
        """Why the owner may compute no more, where a Hub says so; empty otherwise."""
        return self.keys.told(request.headers, REFUSAL)

    def new_session_id(self) -> str:
        return f"s-{secrets.token_hex(12)}"

    def session_of(self, session_id: object, owner: str) -> str:
        """A session of theirs, heard of now. Raises: HttpError 404."""
        if not isinstance(session_id, str) or self.store.session(session_id, owner) is None:
            raise HttpError(404, f"there is no session {str(session_id)[:80]!r}")
        return session_id

    def model_of(self, model_id: object, owner: str) -> TrainedModel:
        """A model of theirs. Raises: HttpError 404."""
        model = self.store.model(model_id, owner) if isinstance(model_id, str) else None
        if model is None:
            raise HttpError(404, f"there is no model {str(model_id)[:120]!r}")
        return model

    def weights_at(self, path: object, owner: str) -> SavedWeights:
        """Weights of theirs, or public ones. Raises: HttpError 404."""
        found = self.store.checkpoint(path, owner) if isinstance(path, str) else None
        if found is None:
            raise HttpError(404, f"there are no weights at {str(path)[:200]!r}")
        return found

    def check_base(self, name: object) -> None:
        """Raises: UserError for another base than the one that is served."""
        if name != self.config.model_name:
            raise UserError(f"base_model: {str(name)[:120]!r} is not served here; {self.config.model_name!r} is")

    def check_quota(self, owner: str, request_id: str = "") -> None:
        """Raises: HttpError 429 while too much of theirs waits.

        What was accepted before is answered again, and what others wait for is let in, or neither would ever end.
        """
        model_id, _, number = request_id.rpartition(":")
        is_next = number.isdigit() and self.worker.awaited(model_id) == int(number)
        if is_next or (request_id and self.store.operation(request_id) is not None):
            return
        count, num_bytes = self.store.pending(owner)
        if count >= self.config.max_waiting or num_bytes >= self.config.max_waiting_bytes:
            raise HttpError(429, f"{count} requests of this key wait ({num_bytes:,} bytes); more are taken later")

    def accept_training(self, kind: Kind, model: TrainedModel, seq_id: int, body: bytes) -> dict[str, Any]:
        """Take an operation of a model; the promise. A number that was used for something else fails by its future."""
        request_id = f"{model.model_id}:{seq_id}"
        digest = hashlib.sha256(kind.encode() + b"\0" + body).digest()
        operation = Operation(
            request_id, kind, model.owner, model.session_id, model.model_id, seq_id, body, digest, time.time()
        )
        known = self.store.accept(operation)
        if known is operation:
            self.worker.add(operation)
        elif known.digest != digest:
            request_id = f"{request_id}:{digest.hex()[:12]}"
            error = f"request {seq_id} of this model was sent before with another content, which stands"
            other = Operation(request_id, kind, model.owner, model.session_id, "", -1, b"", digest)
            self.store.accept(other, failed=error)
        return {"request_id": request_id, "model_id": model.model_id}

    def accept_sample(self, owner: str, session_id: str, request_id: str, body: bytes, num: int) -> dict[str, Any]:
        """Take a sample; the promise with an id for each sequence."""
        digest = hashlib.sha256(body).digest()
        operation = Operation(
            request_id, "sample", owner, session_id, "", -1, body, digest, time.time(), num_samples=num
        )
        known = self.store.accept(operation)
        if known is operation:
            self.runner.add(operation)
        elif known.digest != digest:
            request_id = f"{request_id}:{digest.hex()[:12]}"
            again = Operation(request_id, "sample", owner, session_id, "", -1, body, digest, num_samples=num)
            if self.store.accept(again) is again:
                self.runner.add(again)
        ids = [f"{request_id}/{index}" for index in range(num)]
        return {"request_id": request_id, "sample_sequence_ids": ids}

    def refuse_sample(self, owner: str, session_id: str, request_id: str, error: str, num: int) -> dict[str, Any]:
        """The promise of a sample that is wrong: its future says so."""
        operation = Operation(request_id, "sample", owner, session_id, "", -1, b"", b"", num_samples=num)
        self.store.accept(operation, failed=error)
        return {"request_id": request_id, "sample_sequence_ids": [f"{request_id}/{index}" for index in range(num)]}

    def settled(self, kind: Kind, model: TrainedModel, result: bytes) -> str:
        """The id of a request that has its outcome already."""
        request_id = f"{model.model_id}:{kind}"
        operation = Operation(request_id, kind, model.owner, model.session_id, "", -1, b"", b"")
        self.store.accept(operation)
        self.store.settle(operation, Outcome("done", kind, result))
        return request_id

    def folder_to_sample(self, operation: Operation, body: SampleBody) -> str:
        """The weights that a sample is drawn with; "" is the base. Raises: UserError."""
        if body.sampling_session_id is not None:
            sampler = self.store.sampler(body.sampling_session_id, operation.owner)
            if sampler is None:
                raise UserError(f"sampling_session_id: there is no {body.sampling_session_id[:120]!r}")
            if not sampler.model_path:
                if sampler.folder and not self.weights.path(sampler.folder).is_dir():
                    raise UserError("sampling_session_id: its session has ended and its weights are gone; save again")
                return sampler.folder
            path: str | None = sampler.model_path
        else:
            path = body.model_path
        if not path:
            self.check_base(body.base_model or self.config.model_name)
            return ""
        saved = self.store.checkpoint(path, operation.owner)
        if saved is None:
            raise UserError(f"model_path: there are no weights at {path[:200]!r}")
        if is_encrypted(self.weights.path(saved.folder)):
            raise UserError(f"model_path: {path[:200]!r} is encrypted for others; sample with what it is an export of")
        return saved.folder

    async def outcome(self, request_id: str, limit_s: float) -> Outcome | None:
        """What came of a request, waited for; None for one that is not known."""
        return await self.waiters.wait(request_id, lambda: self.store.outcome(request_id), limit_s)

    async def tidy(self) -> None:
        """End silent sessions; drop what has expired, and results that nobody asks for any more."""
        now = self.store.clock()
        for session_id in self.store.silent_sessions(now - self.config.session_s):
            logger.info("a session was not heard of and has ended", extra={"session": session_id})
            self.end_session(session_id)
        for saved in self.store.expired_checkpoints():
            self.store.remove_checkpoint(saved.path)
            self.weights.remove(saved.folder)
        self.store.forget_results(now - self.config.keep_results_s)
        kept = self.store.folders_in_use()
        for folder in self.pool.folders:
            if folder and folder not in kept:
                await self.pool.drop(folder)

    def end_session(self, session_id: str) -> None:
        """Cancel its samples, free its models' memory; their states and its checkpoints stay."""
        self.store.end_session(session_id)
        for operation in self.store.waiting():
            if operation.session_id == session_id and operation.kind == "sample":
                self.runner.cancel(operation.request_id, "its session has ended")
        self.worker.free(self.store.models_of_session(session_id))


def canonical(body: Mapping[str, Any]) -> bytes:
    """A JSON body that is the same bytes however its client ordered it."""
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def service_of(request: Request) -> TrainingService:
    """The service that a request is for."""
    service: TrainingService = request.app.state.service
    return service
