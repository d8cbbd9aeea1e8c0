"""`python -m mettle.trainer.plan RUN_DIR`: what a step of a run will take, from two rollouts and one micro step.

Nothing of the run is done: the policy is loaded, two rollouts of its first environment are sampled and scored, as many
sequences as the run keeps going are decoded for a few tokens, one micro batch made of the rollouts is trained, and one
version is published and loaded. Parts: `Measured` (what was seen), `predict` (what follows). Written to RUN/plan.json.

Others on the host take its cores for a while and leave them again, so a measurement of a second says little of the next
hour. What is measured is therefore the time without the waits for a core (`QuietTime`), which is the same at any load;
what share of the time this process got a core, over all measurements together, tells how many others want the cores
(`Rivals`). Trainer, engine and orchestrator share the cores with these and with each other.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mettle.envs.packages.registry import find_environment
from mettle.errors import ServiceError
from mettle.inference.config import InferenceConfig
from mettle.inference.engine.decoder import Decoder
from mettle.inference.engine.local import run_requests
from mettle.inference.engine.protocol import GenerationRequest
from mettle.inference.engine.published import load_published, prove
from mettle.inference.engine.weights import inference_threads, read_state
from mettle.processes.child import process_memory_bytes
from mettle.processes.host import waits_for_cores_s
from mettle.records.sampling import SamplingParams
from mettle.records.tokens import Batch, filled
from mettle.storage.files import write_json
from mettle.storage.run_dir import RunDir
from mettle.trainer.config import ProbeConfig, TrainerConfig, read_config
from mettle.trainer.initial import ensure_initial_policy
from mettle.trainer.learner import Learner
from mettle.trainer.loop import grid_of, make_learner
from mettle.trainer.memory import activation_bytes_per_token
from mettle.trainer.probe import EngineTransport, EnvironmentProbe
from mettle.trainer.process import setup_torch
from mettle.trainer.program import guarded
from mettle.trainer.publish import canary_sequences, publish_version
from mettle.trainer.ranks import RANK_EFFICIENCY
from mettle.trainer.world import World, join_world

STATES_OF_A_WEIGHT = 4
"""Itself, its gradient and two moments, in float32."""
SHORT = 2
"""Tokens that the run's sequences are decoded for; a token's price is what `MORE` of them take beyond that."""
MORE = (4, 16, 64, 256)
CLEAR_S = 0.25
"""A difference below this is noise, and more tokens are decoded: a small model takes a millisecond a token."""
WARM_S = 10.0
"""A micro step that took less is taken again, thrice at most while all took less; the median of the others counts."""
ORCHESTRATION_BYTES, PAGE_BYTES, WORKER_BYTES = 105 * 2**20, 110 * 2**20, 35 * 2**20
"""Orchestrator and supervisor together, the run page, a process of an environment; each with what it alone holds."""
QUIET_SHARE = 0.95
"""Of the time: who got a core for more of it had the machine to itself."""
CALL_S = 0.6e-3
"""Of server, orchestrator and environment, for a call of the model, while the engine samples. Only a small model shows
it: the quickstart's calls take .57 to .69 ms on idle cores (`time/gather_s` by its 256 rollouts)."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds are of wall time without waits for a core. A rollout's calls together have `prompt_tokens` and
    `completion_tokens`.
    """

    prompt_tokens: float
    completion_tokens: float
    reward: float
    num_sequences: int
    prefill_s: float
    decode_token_s: float
    micro_step_s: float
    micro_rollouts: int
    max_tokens: int
    publish_s: float
    update_s: float
    trainer_bytes: int
    engine_bytes: int
    load: float = 0.0
    """Of the host, while it was measured: processes that ran or waited for a core."""
    cpu_share: float = 1.0
    """Of the measuring's wall time in which it did not wait for a core; the rest of the time others had it."""
    calls: float = 1.0
    """Calls of the model in a rollout."""
    other_bytes: int = ORCHESTRATION_BYTES
    """The run's other processes."""
    num_ranks: int = 1
    """Of the trainer in the run; what is measured is one that does all."""
    num_at_once: int = 1
    """Of these, what has a core each."""
    rank_bytes: int = 0
    """What all further ranks hold beside what one would hold, or all of them while each reads the weights."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One step of the run and all of them, and memory at the peak over all of its processes.

    Seconds are those at the load that was measured, but `quiet_step_s` and `quiet_run_s`, which are those of a machine
    with nothing else to do.
    """

    sample_s: float
    train_s: float
    publish_s: float
    update_s: float
    step_s: float
    run_s: float
    memory_bytes: int
    measured: Measured
    quiet_step_s: float
    quiet_run_s: float


class QuietTime:
    """Measures time without waits for a core, where the kernel tells of these; and how much of the time they were."""

    def __init__(self) -> None:
        self.wall_s, self.quiet_s = 0.0, 0.0

    def measure(self, work: Callable[[], object]) -> float:
        """Seconds of wall time that `work` takes when each of its threads has a core.

        Threads wait for each other, so that the one that waited longest for a core is taken for all.
        """
        waits, own_s, started = waits_for_cores_s(), time.thread_time(), time.perf_counter()
        work()
        wall_s, own_s = time.perf_counter() - started, time.thread_time() - own_s
        if waits is None:
            quiet_s = own_s
        else:
            later = waits_for_cores_s() or {}
            quiet_s = wall_s - max((wait - waits.get(thread, 0.0) for thread, wait in later.items()), default=0.0)
        quiet_s = min(wall_s, max(quiet_s, own_s))
        self.wall_s, self.quiet_s = self.wall_s + wall_s, self.quiet_s + quiet_s
        return quiet_s

    @property
    def share(self) -> float:
        """Of the time, what was no wait."""
        return 1.0 if self.wall_s == 0 else self.quiet_s / self.wall_s


def predict(
    seen: Measured,
    *,
    batch_size: int,
    max_steps: int,
    cores: int = 1,
    trainer_threads: int = 1,
    engine_threads: int = 1,
    is_synchronous: bool = False,
) -> Plan:
    """What the measurements say of the run.

    Trainer, engine and the processes around them work side by side, unless `is_synchronous`: a step takes as long as
    the busiest of them, and longer where all together want more than the cores, which then each get a part of. Others
    on the host take their part in the same way (`Rivals`).
    """
    waves = batch_size / seen.num_sequences
    sample_s = waves * (seen.prefill_s + seen.completion_tokens * seen.decode_token_s)
    calls_s = batch_size * seen.calls * CALL_S
    train_s = seen.micro_step_s * batch_size / seen.micro_rollouts / (1 + RANK_EFFICIENCY * (seen.num_at_once - 1))
    trainer_s, engine_s = train_s + seen.publish_s, sample_s + seen.update_s
    trainer_work, engine_work = trainer_s * trainer_threads * seen.num_at_once, engine_s * engine_threads
    rivals = Rivals(cores, seen.cpu_share, seen.load)
    quiet = Rivals(cores, 1.0)
    if is_synchronous:
        parts = [(trainer_s, trainer_work), (max(engine_s, calls_s), engine_work + calls_s)]
    else:
        parts = [(max(trainer_s, engine_s, calls_s), trainer_work + engine_work + calls_s)]
    step_s, quiet_step_s = (sum(each.stretched(*part) for part in parts) for each in (rivals, quiet))
    slower = step_s / sum(busiest_s for busiest_s, _ in parts)
    memory = seen.trainer_bytes + seen.rank_bytes + seen.engine_bytes + seen.other_bytes
    return Plan(
        max(sample_s, calls_s) * slower, train_s * slower, seen.publish_s * slower, seen.update_s * slower, step_s,
        step_s * max_steps, memory, seen, quiet_step_s, quiet_step_s * max_steps,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rivals:
    """Who else wants the cores, where a thread that was alone in what it did got `share` of the time of one.

    A thread that never waits for anything but a core gets more of it than processes that wake each other up, each of
    which waits anew: where the host's load, which is of everyone who wanted a core, is more, it counts.
    """

    cores: int
    share: float
    load: float = 0.0

    @property
    def others(self) -> float:
        """Threads of others that run or wait, all alike. One that gets s of C cores' time has C / s - 1 beside it."""
        by_share = self.cores / self.share - 1 if self.share < 1.0 else 0.0
        # A load of a minute ago, when the measuring had a core to itself, is nobody's now.
        return max(by_share, self.load - 1) if self.share < QUIET_SHARE else by_share

    def stretched(self, busiest_s: float, work_s: float) -> float:
        """Seconds of what would take `busiest_s` with a core for each, and is `work_s` of work altogether."""
        own = work_s / busiest_s if busiest_s else 1.0
        return busiest_s * max(1.0, (own + self.others) / self.cores)


def plan_run(run_dir: RunDir) -> None:
    """Measure and write RUN/plan.json."""
    config = read_config(run_dir.config("trainer"), TrainerConfig)
    num_ranks = int(json.loads(run_dir.config("run").read_text())["deployment"]["num_trainer_ranks"])
    cores = len(os.sched_getaffinity(0))
    engine = InferenceConfig.model_validate_json(run_dir.config("inference").read_bytes())
    settings = json.loads(run_dir.config("orchestrator").read_text())
    setup_torch(config.num_threads, config.seed)
    ensure_initial_policy(run_dir)
    with join_world(config.device) as world:
        grid_of(config, World(0, num_ranks, world.device))  # refuses ranks that could not be
        before = _memory()
        transport, reading = _roll_out(run_dir, settings, engine, world)
        per_rollout = len(transport.answered) / 2
        prompt, completion = (per_rollout * mean for mean in _mean_lengths(transport))
        number = min(engine.max_slots, settings["batch_size"])
        watch = QuietTime()
        prefill_s, token_s = _decode(watch, transport, number, engine)
        engine_bytes = _memory() - before
        learner = make_learner(config.alone(), run_dir.model, world)
        largest = learner.recipe.micro_batch.max_tokens
        # With a teacher in the trainer each step has a forward pass of it too.
        batch = _batch(transport, settings["batch_size"], largest, has_teacher=learner.distiller.teacher is not None)
        rollouts = len(batch.sequence_lengths)
        micro_s = _micro_step(watch, learner, batch)
        per_token = activation_bytes_per_token(learner.policy, world)
        activations = int(per_token * min(len(batch.token_ids), largest))
        trainer_bytes = _memory() - engine_bytes + activations
        rank_bytes = further_bytes(
            sum(parameter.nbytes for parameter in learner.policy.parameters()), before, activations, trainer_bytes,
            num_ranks=num_ranks, num_replicas=config.num_replicas, is_base=learner.tenant.is_base,
        )  # fmt: skip
        publish_s, update_s, is_beside = _hand_over(watch, run_dir, learner, batch, engine, transport.scheduler.decoder)
        # An adapter is added to its rows; whole weights stand beside those in use until they are proven.
        copies = 1 if is_beside else 2
        seen = Measured(
            prompt, completion, reading, number, prefill_s, token_s, micro_s, rollouts,
            largest, publish_s, update_s, trainer_bytes, before + copies * engine_bytes,
            os.getloadavg()[0], watch.share, per_rollout, _other_bytes(run_dir, settings),
            num_ranks, max(1, min(num_ranks, (cores - engine.threads) // config.num_threads)), rank_bytes,
        )  # fmt: skip
    plan = predict(
        seen, batch_size=settings["batch_size"], max_steps=config.max_steps, cores=cores,
        trainer_threads=config.num_threads, engine_threads=engine.threads, is_synchronous=settings["max_lag"] == 0,
    )  # fmt: skip
    write_json(run_dir.path / "plan.json", asdict(plan))


def further_bytes(
    weights: int, process: int, activations: int, alone: int, *, num_ranks: int, num_replicas: int, is_base: bool
) -> int:
    """Memory of all ranks over that of one that does all (`alone`, of which `process` is there without a model).

    Weights, gradients and moments are cut among the ranks, so they count once for each replica; but every rank reads
    all weights before it keeps its part, and then holds them whole.
    """
    if num_ranks == 1:
        return 0
    state = weights * (STATES_OF_A_WEIGHT if is_base else 1)
    training = (num_ranks - 1) * (process + activations) + (num_replicas - 1) * state
    return max(training, num_ranks * (process + weights) - alone)


def _roll_out(
    run_dir: RunDir, settings: dict[str, Any], engine: InferenceConfig, world: World
) -> tuple[EngineTransport, float]:
    spec, sampling = settings["envs"][0], settings["sampling"]
    probe = EnvironmentProbe.load(
        run_dir.model,
        ProbeConfig(
            env=spec["id"], env_args=spec.get("args") or {}, num_prompts=2,
            temperature=sampling["temperature"] or 1.0, max_tokens=sampling["max_tokens"],
        ),
        world.device,
    )  # fmt: skip
    with inference_threads(engine.threads):
        slots = min(engine.max_slots, settings["batch_size"])
        transport = probe.transport(read_state(run_dir.model), seed=0, max_slots=slots)
        reading = probe.roll_out(transport, seed=0)
    if not transport.answered:
        raise ServiceError("the two rollouts made no call of the model; `mettle env check` looks into the environment")
    return transport, reading.mean_reward


def _mean_lengths(transport: EngineTransport) -> tuple[float, float]:
    pairs = transport.answered
    prompt = sum(generation.num_prompt_tokens for _, generation in pairs) / len(pairs)
    return prompt, sum(len(generation.choices[0].token_ids) for _, generation in pairs) / len(pairs)


def _micro_step(watch: QuietTime, learner: Learner, batch: Batch) -> float:
    numbers = iter(range(1, 5))
    first_s = watch.measure(lambda: learner.train(batch, next(numbers)))
    if first_s >= WARM_S:
        return first_s
    # A process's first step is slower than its others.
    found: list[float] = []
    while len(found) < 3 and first_s + sum(found) < WARM_S:
        found.append(watch.measure(lambda: learner.train(batch, next(numbers))))
    return float(np.median(found))


def _decode(watch: QuietTime, transport: EngineTransport, number: int, engine: InferenceConfig) -> tuple[float, float]:
    """(seconds for the prompts of `number` sequences, seconds for one more token of each)."""
    prompts = [list(request.prompt_ids) for request, _ in transport.answered[:2]]
    room = transport.scheduler.limits.max_model_len - max(len(prompt) for prompt in prompts)

    def decode(length: int) -> float:
        params = SamplingParams(max_tokens=length, temperature=1.0, ignore_eos=True)
        share = math.ceil(number / len(prompts))
        requests = [GenerationRequest(f"{length}-{i}", prompt, params, share) for i, prompt in enumerate(prompts)]
        with inference_threads(engine.threads):
            return watch.measure(lambda: run_requests(transport.scheduler, requests))

    decode(1)  # the first one warms up
    short_s, token_s = decode(SHORT), 1e-6
    for more in (length for length in MORE if length == MORE[0] or SHORT + length <= room):
        beyond_s = decode(SHORT + more) - short_s
        token_s = max(token_s, beyond_s / more)
        if beyond_s >= CLEAR_S:
            token_s = beyond_s / more
            break
    return max(0.0, short_s - SHORT * token_s), token_s


def _batch(transport: EngineTransport, batch_size: int, max_tokens: int, *, has_teacher: bool) -> Batch:
    """The rollouts over and over, every other one good, until a micro batch or the run's batch is full."""
    rows: list[dict[str, Any]] = []
    num_tokens = 0
    while len(rows) < batch_size:
        request, generation = transport.answered[len(rows) % len(transport.answered)]
        choice = generation.choices[0]
        ids = np.array([*request.prompt_ids, *choice.token_ids], np.int32)
        if rows and num_tokens + len(ids) > max_tokens:
            break
        is_sampled = np.arange(len(ids)) >= len(request.prompt_ids)
        logprobs = np.zeros(len(ids), np.float32)
        logprobs[is_sampled] = choice.logprobs
        sign = 1.0 if len(rows) % 4 < 2 else -1.0
        rows.append(filled(len(ids), {
            "token_ids": ids, "loss_mask": is_sampled, "logprobs": logprobs, "rl_weights": is_sampled,
            "advantages": np.where(is_sampled, sign, 0.0),
            "distill_weights": is_sampled * float(has_teacher),
        }))  # fmt: skip
        num_tokens += len(ids)
    columns: dict[str, Any] = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    lengths = np.array([len(row["token_ids"]) for row in rows], np.int32)
    return Batch(sequence_lengths=lengths, step=1, draw_ids=(), **columns)


def _other_bytes(run_dir: RunDir, settings: dict[str, Any]) -> int:
    run = json.loads(run_dir.config("run").read_text())
    workers = 0
    for spec in settings["envs"]:
        asked = settings["env_workers"] if spec.get("workers") is None else spec["workers"]
        # As the orchestrator does it: what did not come with Mettle has a process of its own.
        workers += int(not find_environment(spec["id"]).is_shipped) if asked is None else asked
    return ORCHESTRATION_BYTES + workers * WORKER_BYTES + (PAGE_BYTES if run["deployment"]["hub"] else 0)


def _memory() -> int:
    return process_memory_bytes(os.getpid())


def _hand_over(
    watch: QuietTime, run_dir: RunDir, learner: Learner, batch: Batch, engine: InferenceConfig, served: Decoder
) -> tuple[float, float, bool]:
    """Seconds to publish a version and to take it over, and whether it is served beside the base's own weights."""
    folder, kinds = run_dir.version(1), set()

    def load() -> None:
        policy = load_published(folder, 1, run_dir.model, served.with_state, served)
        prove(policy.decoder, folder, 1, tolerance=1.0, adapter=policy.adapter)
        kinds.add(policy.is_base)

    publish_s = watch.measure(lambda: publish_version(run_dir.weights, 1, learner, canary_sequences(batch, 4)))
    with inference_threads(engine.threads):
        return publish_s, watch.measure(load), kinds == {True}


if __name__ == "__main__":
    sys.exit(guarded("mettle.trainer.plan", sys.argv[1:], plan_run))
