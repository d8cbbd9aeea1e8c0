"""The engine's weights: a version counts when it is acknowledged, and a restarted engine gets it again."""

import asyncio

import pytest

from mettle.errors import ServiceError
from mettle.inference.engine.protocol import WeightUpdate
from mettle.orchestrator.policy import ServedPolicy
from mettle.orchestrator.simulator import SimulatedEngine, SimulatedWorld
from mettle.orchestrator.updater import Updater
from mettle.orchestrator.waits import Pulse, Waits
from mettle.processes.beats import Heartbeat
from mettle.processes.virtual_time import run_virtually
from mettle.records.versions import CanaryCheck, WeightVersion
from mettle.storage.ledger import Ledger


class Newest:
    """An order that never holds anything back."""

    def target(self, current, newest):
        return newest


class Held:
    """An order that keeps the engine where it is once it has version `at`."""

    def __init__(self, at):
        self.at = at

    def target(self, current, newest):
        return current if current == self.at else min(self.at, newest)


class Bench:
    """An updater with a simulated engine and a real ledger."""

    def __init__(self, folder, world=None, order=None, engine=None):
        self.ledger = Ledger(folder / "run.db", clock=asyncio.get_running_loop().time)
        self.engine = engine or SimulatedEngine(world or SimulatedWorld())
        pulse = Pulse()
        self.policy = ServedPolicy(pulse)
        self.heart = Heartbeat(name="orchestrator", clock=asyncio.get_running_loop().time)
        self.waits = Waits(self.heart, pulse)
        self.updater = Updater(
            self.engine, self.ledger, self.policy, self.waits, order or Newest(),
            poll_s=0.05, health_s=2.0, canary_tolerance=1e-3, inference_budget_s=20.0,
        )  # fmt: skip
        self.running = asyncio.create_task(self.updater.run())

    def publish(self, version, digest="d"):
        self.ledger.publish(WeightVersion(version, f"weights/v{version}", f"{digest}{version}"))

    async def close(self):
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        self.ledger.close()


def played(folder, scenario, **options):
    async def main():
        bench = Bench(folder, **options)
        try:
            await scenario(bench)
        finally:
            await bench.close()

    run_virtually(main())


def test_a_version_counts_only_once_the_engine_has_acknowledged_it(tmp_path):
    async def scenario(bench):
        bench.publish(0)
        await asyncio.sleep(0.06)
        assert bench.policy.version == -1
        assert bench.ledger.version(0).acked_at is None
        await asyncio.sleep(5.0)
        assert bench.policy.version == 0
        assert bench.policy.is_serving
        row = bench.ledger.version(0)
        assert row.acked_at is not None
        assert row.canary.mean_abs_diff == 0.0
        assert row.update_ms == 3000.0

    played(tmp_path, scenario, world=SimulatedWorld(update_s=3.0))


def test_the_same_version_with_other_bytes_is_pushed_again(tmp_path):
    async def scenario(bench):
        bench.publish(0)
        await asyncio.sleep(1.0)
        bench.publish(0, digest="other")
        await asyncio.sleep(1.0)
        assert bench.engine.num_updates == 2
        assert bench.ledger.version(0).acked_at is not None

    played(tmp_path, scenario)


def test_an_engine_that_was_restarted_gets_the_weights_before_it_counts_again(tmp_path):
    async def scenario(bench):
        bench.publish(0)
        bench.publish(3)
        await asyncio.sleep(1.0)
        bench.engine.life, bench.engine.version = 1, 0
        await asyncio.sleep(5.0)
        assert (bench.engine.version, bench.engine.num_updates) == (3, 2)
        assert bench.policy.is_serving
        assert [event.kind for event in bench.ledger.journal.events()] == ["engine_changed"]

    played(tmp_path, scenario)


def test_a_restarted_engine_is_not_trusted_for_saying_the_same_version(tmp_path):
    async def scenario(bench):
        bench.publish(0)
        await asyncio.sleep(1.0)
        bench.engine.life = 1
        await asyncio.sleep(5.0)
        assert bench.engine.num_updates == 2

    played(tmp_path, scenario)


def test_an_update_can_be_held_back_and_goes_through_the_version_asked_for(tmp_path):
    async def scenario(bench):
        bench.publish(0)
        bench.publish(1)
        bench.publish(2)
        await asyncio.sleep(3.0)
        assert bench.policy.version == 1

    played(tmp_path, scenario, order=Held(1))


def test_a_canary_that_differs_is_a_refusal_even_if_the_engine_is_content(tmp_path):
    class Stale(SimulatedEngine):
        async def update(self, weights):
            return WeightUpdate(weights.version, 0.0, 1.0, CanaryCheck(weights.version, 0.3, 0.9, 64))

    async def scenario(bench):
        bench.publish(0)
        with pytest.raises(ServiceError, match=r"canary differs by 0.3 on average.*refused 3 times"):
            await bench.running
        assert bench.policy.version == -1
        assert bench.ledger.version(0).acked_at is None

    played(tmp_path, scenario, engine=Stale(SimulatedWorld()))


def test_a_canary_that_is_not_a_number_is_a_refusal(tmp_path):
    class Broken(SimulatedEngine):
        async def update(self, weights):
            return WeightUpdate(weights.version, 0.0, 1.0, CanaryCheck(weights.version, float("nan"), float("nan"), 64))

    async def scenario(bench):
        bench.publish(0)
        with pytest.raises(ServiceError, match="differs by nan"):
            await bench.running

    played(tmp_path, scenario, engine=Broken(SimulatedWorld()))


def test_a_lost_engine_is_waited_for_by_name_and_is_found_again(tmp_path):
    async def scenario(bench):
        bench.publish(0)
        await asyncio.sleep(1.0)
        bench.engine.is_up = False
        await asyncio.sleep(5.0)
        (wait,) = bench.heart.waits
        assert (wait.owner, wait.edge, wait.awaits) == (
            "orchestrator/updater",
            "inference",
            "engine answers /health",
        )
        assert not bench.policy.is_serving
        bench.engine.is_up = True
        await asyncio.sleep(1.0)
        assert bench.policy.is_serving
        assert bench.heart.waits == []

    played(tmp_path, scenario)


def test_waiting_for_a_version_names_who_is_awaited(tmp_path):
    async def scenario(bench):
        bench.publish(0)
        reaching = asyncio.create_task(bench.policy.reach(1, bench.waits, weights_s=50.0, inference_s=50.0))
        await asyncio.sleep(3.0)
        (wait,) = bench.heart.waits
        assert (wait.owner, wait.edge, wait.awaits) == ("orchestrator", "weights", "trainer publishes v1")
        bench.publish(1)
        await asyncio.sleep(9.0)
        (wait,) = bench.heart.waits
        assert (wait.edge, wait.awaits) == ("inference", "engine acknowledges v1")
        assert await reaching == pytest.approx(20.05, abs=0.2)
        assert bench.heart.waits == []

    played(tmp_path, scenario, world=SimulatedWorld(update_s=10.0))


def test_a_short_wait_is_no_news(tmp_path):
    async def scenario(bench):
        over = []
        asyncio.get_running_loop().call_later(0.5, lambda: (over.append(1), bench.policy.lose()))
        waited = await bench.waits.until(lambda: bool(over), edge="rollouts", awaits="a group", budget_s=9.0)
        assert waited == pytest.approx(0.5, abs=0.01)

    played(tmp_path, scenario)
