"""The one thread that trains: it takes the operation whose turn it is, a pass at a time, and records what came of it.

    waiting (by number, per model) -> deficit round robin -> begin -> passes ... -> outcome and `last_seq`, at once

Between two passes it may serve another model. Invariant: an outcome is told after it is in the database; a model whose
memory may be ahead of the database (the disk refused, the code failed) is forgotten and made again from its snapshot
and the operations since.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

from mettle.errors import StorageError, UserError
from mettle.trainer.service.config import TrainServeConfig
from mettle.trainer.service.core import PassRun
from mettle.trainer.service.fairness import DeficitRoundRobin, Wish
from mettle.trainer.service.models import ResidentModels
from mettle.trainer.service.operations import Operations
from mettle.trainer.service.order import ModelOrder
from mettle.trainer.service.records import Operation, Outcome
from mettle.trainer.service.store import Store
from mettle.trainer.service.wire import messages
from mettle.trainer.service.wire.answers import loss_answer
from mettle.trainer.service.wire.orders import read_order

logger = logging.getLogger(__name__)

T = TypeVar("T")
_RETRY_S: Final = 1.0
_LOOK_S: Final = 1.0


class TrainingWorker:
    """Runs operations until `close`. `on_settled` hears, from the thread, of each request that has an outcome."""

    def __init__(
        self,
        store: Store,
        models: ResidentModels,
        operations: Operations,
        config: TrainServeConfig,
        on_settled: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._models, self._operations, self._config = store, models, operations, config
        self._on_settled, self._clock = on_settled, clock
        self._changed = threading.Condition()
        self._orders: dict[str, ModelOrder] = {}
        self._ids: dict[tuple[str, int], str] = {}
        self._owners: dict[str, str] = {}
        self._under_way: dict[str, tuple[Operation, PassRun]] = {}
        self._calls: list[Callable[[], None]] = []
        self._fair = DeficitRoundRobin(quantum=config.pass_tokens)
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="training", daemon=True)

    def start(self) -> None:
        """Begin with what was accepted before."""
        for operation in self._store.waiting():
            if operation.model_id:
                self.add(operation)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Operations that wait or run."""
        return len(self._ids)

    def close(self) -> None:
        """End after the pass that runs; what waits goes on at the next start."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def add(self, operation: Operation) -> None:
        """Let an accepted operation wait for its turn; one whose turn is over fails."""
        model_id = operation.model_id
        with self._changed:
            order = self._orders.get(model_id)
            if order is None:
                model = self._store.model(model_id)
                order = self._orders[model_id] = ModelOrder(-1 if model is None else model.last_seq)
            is_late = order.is_late(operation.seq_id)
            if not is_late:
                order.add(operation.seq_id)
                self._ids[model_id, operation.seq_id] = operation.request_id
                self._owners[model_id] = operation.owner
                self._changed.notify()
        if is_late:
            error = f"request {operation.seq_id} came after request {order.last} of this model had had its turn"
            self._store.settle(operation, Outcome("failed", operation.kind, b"", "user", error))
            self._on_settled(operation.request_id)

    def awaited(self, model_id: str) -> int | None:
        """The number that the waiting operations of a model wait for; None where none wait, or the next is there."""
        with self._changed:
            order = self._orders.get(model_id)
            return None if order is None or not order.waiting or order.ready is not None else order.last + 1

    def call(self, do: Callable[[], T]) -> Future[T]:
        """Do something with the core between two passes."""
        done: Future[T] = Future()

        def command() -> None:
            try:
                done.set_result(do())
            except Exception as error:  # it belongs to the caller
                done.set_exception(error)

        with self._changed:
            self._calls.append(command)
            self._changed.notify()
        return done

    def free(self, model_ids: list[str]) -> None:
        """Free the memory of models that are not asked for any more; they come back with their next operation."""

        def put_away() -> None:
            for model_id in model_ids:
                if model_id not in self._under_way:
                    self._models.put_away(model_id)

        self.call(put_away)

    def _run(self) -> None:
        while True:
            with self._changed:
                calls, self._calls = self._calls, []
                given_up = self._watch_gaps()
                wishes = self._wishes()
                if self._is_closing:
                    return
                if not (calls or given_up or wishes):
                    self._changed.wait(_LOOK_S)
                    continue
            for command in calls:
                command()
            for model_id, missing, numbers in given_up:
                self._give_up(model_id, missing, numbers)
            if wishes:
                self._advance(self._fair.pick(wishes))

    def _wishes(self) -> dict[str, Wish]:
        wishes = {}
        for model_id, order in self._orders.items():
            if order.ready is not None:
                begun = self._under_way.get(model_id)
                wishes[model_id] = Wish(self._owners[model_id], begun[1].cost if begun else 1)
        return wishes

    def _watch_gaps(self) -> list[tuple[str, int, list[int]]]:
        found = []
        for model_id, order in self._orders.items():
            missing = order.last + 1
            if numbers := order.watch(self._clock(), self._config.gap_s):
                found.append((model_id, missing, numbers))
        return found

    def _give_up(self, model_id: str, missing: int, numbers: list[int]) -> None:
        error = (
            f"request {missing} of this model did not come within {self._config.gap_s:g} s (was it refused before it "
            f"was sent?), so what waited for it failed: {', '.join(map(str, numbers[:8]))}"
        )
        for request_id in self._store.give_up(model_id, numbers, error):
            self._on_settled(request_id)
        logger.warning("gave up on a gap", extra={"model": model_id, "missing": missing})

    def _advance(self, model_id: str) -> None:
        """One pass of a model's operation, or all of one that has no passes."""
        number = self._orders[model_id].ready
        assert number is not None, "a model is picked for the operation whose turn it is"
        begun = self._under_way.get(model_id)
        operation = begun[0] if begun else self._store.operation(self._ids[model_id, number])
        assert operation is not None, "an operation that waits is in the database"
        if operation.state != "waiting":
            self._finished(operation)
            return
        try:
            if begun is None and operation.kind in ("forward", "forward_backward"):
                self._begin(operation)
            elif begun is None:
                self._operations.carry_out(operation)
                self._finished(operation)
            else:
                self._pass(operation, begun[1])
        except StorageError as error:
            logger.error("cannot record an operation; trying again", extra={"reason": str(error)})
            self._forget(model_id)
            time.sleep(_RETRY_S)
        except UserError as error:
            self._fail(operation, "user", str(error))
        except Exception as error:  # the boundary of the thread: the error belongs to one operation
            logger.exception("an operation failed", extra={"request": operation.request_id})
            self._forget(model_id)
            self._fail(operation, "server", f"{type(error).__name__}: {error}")

    def _begin(self, operation: Operation) -> None:
        running = self._models.get(operation.model_id)
        order = read_order(messages.parse(messages.ForwardBackwardRequest, operation.body))
        run = self._models.core.begin(running, order)
        self._under_way[operation.model_id] = (operation, run)

    def _pass(self, operation: Operation, run: PassRun) -> None:
        try:
            self._models.core.advance(run)
        except BaseException:
            self._models.core.abandon(run)
            raise
        if not run.is_over:
            return
        num_tokens = run.sums["num_tokens"]
        metrics = {"loss:sum": run.sums["loss"], "tokens:sum": num_tokens}
        result = loss_answer(run.logprobs, metrics)
        num_read = sum(len(datum.token_ids) for datum in run.order.data)
        self._store.settle(operation, Outcome("done", operation.kind, result, num_tokens=num_read))
        if not run.order.is_forward_only:
            self._models.spent(operation.model_id)
        self._finished(operation)

    def _fail(self, operation: Operation, category: str, error: str) -> None:
        self._under_way.pop(operation.model_id, None)
        try:
            self._store.settle(operation, Outcome("failed", operation.kind, b"", category, error))
        except StorageError as refused:
            logger.error("cannot record an operation; trying again", extra={"reason": str(refused)})
            time.sleep(_RETRY_S)
            return
        self._finished(operation)

    def _finished(self, operation: Operation) -> None:
        """An operation that has an outcome has had its turn."""
        self._under_way.pop(operation.model_id, None)
        with self._changed:
            self._orders[operation.model_id].finish(operation.seq_id)
            self._ids.pop((operation.model_id, operation.seq_id), None)
        self._on_settled(operation.request_id)

    def _forget(self, model_id: str) -> None:
        self._under_way.pop(model_id, None)
        self._models.forget(model_id)
