"""Faults are injected between a real engine and a real trainer, and have to be named; healthy runs must be silent."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.trainer.conftest import make_batch, make_learner
from tests.trainer.test_grid import train_on_ranks

from mettle.inference.engine.decoders import make_decoder
from mettle.inference.engine.limits import Limits
from mettle.inference.engine.local import generate_batch, run_requests
from mettle.inference.engine.protocol import GenerationRequest
from mettle.inference.engine.scheduler import Scheduler
from mettle.records.sampling import SamplingParams
from mettle.records.tokens import SampledBy, filled
from mettle.storage.batches import write_batch
from mettle.trainer.adapter import Adapter
from mettle.trainer.config import LoraConfig
from mettle.trainer.mismatch.diagnosis import Comparer, readable_folders
from mettle.trainer.mismatch.tokens import choose
from mettle.trainer.mismatch.weights import as_int8
from mettle.trainer.publish import fixed_sequences, publish_version
from mettle.trainer.tenant import Tenant

TOLERANCE = 2e-3
PLAIN = SamplingParams(max_tokens=16, seed=3, ignore_eos=True)


def at_night(*points):
    """Further points of the same search, which one of each kind stands for by day."""
    return [pytest.param(*(p if isinstance(p, tuple) else (p,)), marks=pytest.mark.nightly) for p in points]


@pytest.fixture
def learner(mini_model):
    return sharpened(make_learner(mini_model))


def sharpened(learner):
    """A fresh policy says almost the same of every token; one that has learnt something does not."""
    with torch.no_grad():
        torch.manual_seed(0)
        for parameter in learner.policy.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5.0)
    return learner


@pytest.fixture
def published(learner, tmp_path):
    """v0 to v2 on disk, each a small step from the one before; the network holds v2."""
    generator = torch.Generator().manual_seed(1)
    for version in range(3):
        with torch.no_grad():
            for parameter in learner.policy.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise, alpha=0.02 * float(parameter.std(correction=0)))
        publish_version(tmp_path / "weights", version, learner, fixed_sequences(256, 2))
    return tmp_path / "weights"


def state_of(learner):
    network = learner.policy.network
    return network.config.to_dict(), {name: t.detach().clone() for name, t in network.state_dict().items()}


def prompts(number=6, length=9):
    rng = np.random.default_rng(5)
    return [rng.integers(1, 250, length).tolist() for _ in range(number)]


def generated(state, params=PLAIN, *, seen=None, dtype=torch.float32):
    """(prompt, tokens, logprobs) of a real engine; `seen` are the prompts that it got in place of the recorded ones."""
    config, weights = state
    given = prompts()
    decoder = make_decoder(config, weights, torch.device("cpu"), dtype)
    scheduler = Scheduler(decoder, Limits(16, decoder.shape.max_positions))
    requests = [GenerationRequest(str(i), p, params) for i, p in enumerate(seen or given)]
    choices = [generation.choices[0] for generation in run_requests(scheduler, requests)]
    return [(prompt, c.token_ids, c.logprobs) for prompt, c in zip(given, choices, strict=True)]


def batch_of(rollouts, *, version=2, step=3, temperature=1.0, replicas=()):
    """`replicas` names the engine of each rollout."""
    samples = []
    for prompt, tokens, logprobs in rollouts:
        length = len(prompt) + len(tokens)
        mask = np.arange(length) >= len(prompt)
        columns = {
            "token_ids": np.array([*prompt, *tokens]),
            "loss_mask": mask,
            "logprobs": np.array([0.0] * len(prompt) + logprobs),
            "versions": np.where(mask, version, -1),
            "temperatures": np.full(length, temperature),
            "advantages": np.where(mask, 1.0, 0.0),
            "rl_weights": np.where(mask, 1.0, 0.0),
        }
        samples.append(filled(length, columns))
    batch = make_batch(samples, step=step)
    ends = np.cumsum(batch.sequence_lengths).tolist()
    spans = tuple(
        SampledBy(end - len(tokens), end, name)
        for end, (_, tokens, _), name in zip(ends, rollouts, replicas, strict=False)
    )
    return dataclasses.replace(batch, replicas=spans)


def compared(learner, published, batch):
    comparer = Comparer(learner, batch.step - 1, readable_folders(published))
    return comparer.compare(choose(batch, 16, seed=0), TOLERANCE)


@pytest.mark.parametrize(
    ("version", "temperature"), [(2, 1.0), (1, 0.6), *at_night((2, 0.6), (1, 1.0), (2, 1.3), (1, 1.3))]
)
def test_a_healthy_run_is_silent(learner, published, version, temperature):
    config, weights = state_of(learner)
    weights = weights | load_file(published / f"v{version}" / "model.safetensors")
    params = dataclasses.replace(PLAIN, temperature=temperature)
    before = state_of(learner)[1]
    found = compared(
        learner, published, batch_of(generated((config, weights), params), version=version, temperature=temperature)
    )
    assert (found.cause, found.affected) == ("", 0)
    assert found.mean_abs < 1e-5
    assert found.num_tokens == 6 * 16
    assert all(torch.equal(before[name], tensor) for name, tensor in state_of(learner)[1].items())


SAMPLING_FAULTS = {
    "temperature": ("temperature", {"temperature": 0.8}, "temperature 0.8,"),
    "repetition": ("penalty", {"repetition_penalty": 1.3}, "repetition_penalty 1.3,"),
    "presence": ("penalty", {"presence_penalty": 0.7}, "presence_penalty 0.7,"),
    "frequency": ("penalty", {"frequency_penalty": 0.9, "max_tokens": 48}, "frequency_penalty 0.9,"),
    "top_p": ("truncation", {"top_p": 0.9}, "top_p 0.9,"),
    "top_k": ("truncation", {"top_k": 20}, "top_k 20,"),
}


@pytest.mark.parametrize("fault", ["temperature", "repetition", "top_p", *at_night("presence", "frequency", "top_k")])
def test_sampling_otherwise_than_was_asked_is_named_with_its_value(learner, published, fault):
    cause, changes, said = SAMPLING_FAULTS[fault]
    found = compared(learner, published, batch_of(generated(state_of(learner), dataclasses.replace(PLAIN, **changes))))
    assert found.cause == cause
    assert said in found.detail


@pytest.mark.parametrize("lag", [1, *at_night(2)])
def test_a_stale_replica_is_named_though_the_others_are_well(learner, published, lag):
    config, weights = state_of(learner)
    old = weights | load_file(published / f"v{2 - lag}" / "model.safetensors")
    rollouts = generated((config, weights))[:4] + generated((config, old))[4:]
    found = compared(learner, published, batch_of(rollouts))
    assert (found.cause, found.affected, found.num_sequences) == ("stale weights", 2, 6)
    assert f"v2 was v{2 - lag}" in found.detail


THREE = ("one", "two", "three")


@pytest.mark.parametrize("fault", ["stale weights", "int8"])
def test_one_replica_of_three_that_is_ill_is_named(learner, published, fault):
    config, weights = state_of(learner)
    stale = weights | load_file(published / "v1" / "model.safetensors")
    ill = {"stale weights": stale, "int8": {n: as_int8(w) for n, w in weights.items()}}[fault]
    well = generated((config, weights))
    rollouts = [(generated((config, ill)) if i % 3 == 1 else well)[i] for i in range(6)]
    found = compared(learner, published, batch_of(rollouts, replicas=THREE * 2))
    assert (found.cause, found.replicas, found.affected) == (fault, ("two",), 2)
    assert "of 3 replicas two alone" in found.detail
    rows = {label: (mean, count) for label, mean, count in found.table["replica"]}
    assert max(rows["one"][0], rows["three"][0]) < 1e-5 < rows["two"][0]
    assert [count for _, count in rows.values()] == [32, 32, 32]


@pytest.mark.e2e
@pytest.mark.slow
def test_two_ranks_name_the_replica_that_one_rank_does(learner, published, mini_model, tmp_path):
    """Each compares its share of the sequences, and all find the same; weights are exchanged in parts. So do ranks that
    train on parts of one sequence."""
    config, weights = state_of(learner)
    model = shutil.copytree(mini_model, tmp_path / "model")
    shutil.copy(published / "v2" / "model.safetensors", model / "model.safetensors")
    stale = weights | load_file(published / "v1" / "model.safetensors")
    int8 = {n: as_int8(w) for n, w in weights.items()}
    ills = [("stale weights", stale, 1), ("int8", int8, 1), ("stale weights", stale, 2)]
    well, cases, batches = generated((config, weights)), [], []
    for _, ill, context in ills:
        rollouts = [(generated((config, ill)) if i % 3 == 1 else well)[i] for i in range(5)]
        batches.append(batch_of(rollouts, replicas=THREE * 2))
        digest, _ = write_batch(tmp_path / "batches", batches[-1])
        compare = [digest, str(tmp_path / "batches"), str(published)]
        config_of = {"max_steps": 9, "device": "cpu", "context_parallel": context}
        cases.append({"model": str(model), "config": config_of, "compare": compare})
    found = train_on_ranks(tmp_path / "two", cases, 2)
    for (cause, _, _), batch, (ranks, _) in zip(ills, batches, found, strict=True):
        alone = compared(learner, published, batch)
        assert ranks[0] == ranks[1]
        assert (ranks[0]["cause"], ranks[0]["replicas"], ranks[0]["num_tokens"]) == (cause, ["two"], 5 * 16)
        assert (alone.cause, alone.replicas, alone.detail) == (cause, ("two",), ranks[0]["detail"])
        assert ranks[0]["mean_abs"] == pytest.approx(alone.mean_abs, rel=1e-3)


def test_what_ails_every_replica_is_told_of_none(learner, published):
    params = dataclasses.replace(PLAIN, temperature=0.8)
    found = compared(learner, published, batch_of(generated(state_of(learner), params), replicas=THREE * 2))
    assert (found.cause, found.replicas) == ("temperature", ())


def test_a_sequence_of_two_replicas_is_compared_as_each_sampled_it(learner, published):
    """The second half of each completion came from a replica with older weights."""
    config, weights = state_of(learner)
    stale = weights | load_file(published / "v1" / "model.safetensors")
    first = generated((config, weights), dataclasses.replace(PLAIN, max_tokens=8))
    longer = [prompt + tokens for prompt, tokens, _ in first]
    second = generated((config, stale), dataclasses.replace(PLAIN, max_tokens=8), seen=longer)
    joined = [(p, a + b, la + lb) for (p, a, la), (_, b, lb) in zip(first, second, strict=True)]
    batch = batch_of(joined)
    begins = [end - 16 for end in np.cumsum(batch.sequence_lengths).tolist()]
    spans = [SampledBy(b + at, b + at + 8, name) for b in begins for at, name in ((0, "well"), (8, "ill"))]
    found = compared(learner, published, dataclasses.replace(batch, replicas=tuple(spans)))
    assert (found.cause, found.replicas, found.num_sequences, found.affected) == ("stale weights", ("ill",), 12, 6)


def test_few_sequences_are_taken_from_all_replicas(learner):
    rollouts = generated(state_of(learner))
    batch = batch_of(rollouts, replicas=["one"] * 4 + ["two", "three"])
    assert [s.number for s in choose(batch, 6, seed=0)] == list(range(6))
    for seed in range(8):
        chosen = choose(batch, 3, seed=seed)
        assert sorted(s.replica for s in chosen) == sorted(THREE)


def test_an_adapter_that_is_not_loaded_is_named(mini_model, tmp_path):
    learner = sharpened(make_learner(mini_model))
    base = state_of(learner)
    adapter = Adapter.create(learner.policy.network, LoraConfig(rank=4), 0)
    with torch.no_grad():
        for name, parameter in adapter.parameters().items():
            if "lora_B" in name:
                parameter.normal_(0, 0.05)
    learner.switch(Tenant.of_adapter("policy", adapter))
    found = compared(learner, tmp_path, batch_of(generated(base)))
    assert (found.cause, found.affected) == ("adapter", 6)


@pytest.mark.parametrize("drift", ["end", *at_night("first", "doubled")])
def test_a_prompt_that_the_template_made_otherwise_is_named(learner, published, drift):
    seen = {"first": lambda p: p[1:], "end": lambda p: p[:-3], "doubled": lambda p: p[:1] + p}[drift]
    said = {"first": "without its first token", "end": "without its last 3 tokens", "doubled": "first token twice"}
    found = compared(learner, published, batch_of(generated(state_of(learner), seen=list(map(seen, prompts())))))
    assert found.cause == "template"
    assert said[drift] in found.detail


def test_an_engine_in_bfloat16_is_named(learner, published):
    found = compared(learner, published, batch_of(generated(state_of(learner), dtype=torch.bfloat16)))
    assert found.cause == "bfloat16"


def test_an_engine_in_int8_is_named(learner, published):
    config, weights = state_of(learner)
    found = compared(learner, published, batch_of(generated((config, {n: as_int8(w) for n, w in weights.items()}))))
    assert found.cause == "int8"


def test_what_nothing_explains_is_called_unknown_and_shown_by_position(learner, published):
    rollouts = [
        (prompt, tokens, [x - (0.5 if i >= 4 else 0.0) for i, x in enumerate(logprobs)])
        for prompt, tokens, logprobs in generated(state_of(learner))
    ]
    found = compared(learner, published, batch_of(rollouts))
    assert found.cause == "unknown"
    rows = {label: mean for label, mean, _ in found.table["position"]}
    assert rows["0 to 3"] < 1e-5
    assert rows["4 to 15"] == pytest.approx(0.5, abs=1e-4)


def test_tokens_after_new_weights_came_in_are_left_out(learner, published):
    batch = batch_of(generated(state_of(learner)))
    versions = batch.versions.copy()
    versions[9 + 5 : 9 + 16] = 3  # the first sequence's later tokens
    sequences = choose(dataclasses.replace(batch, versions=versions), 16, seed=0)
    assert [len(s.places) for s in sequences] == [5, 16, 16, 16, 16, 16]


def test_what_the_local_engine_says_is_what_is_compared(learner, published):
    """The tests' own way to an engine is the one that the rest of the program has."""
    config, weights = state_of(learner)
    local = generate_batch(config, weights, prompts(), PLAIN)
    assert [g.choices[0].token_ids for g in local] == [tokens for _, tokens, _ in generated((config, weights))]
