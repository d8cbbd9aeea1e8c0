"""Router replay: the trainer computes with the experts that the engine took, and tells how they are loaded."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from tests.trainer.conftest import ALONE, gradients, make_batch, make_learner

from mettle.errors import StorageError
from mettle.inference.engine.decoders import make_decoder
from mettle.inference.engine.limits import Limits
from mettle.inference.engine.local import run_requests
from mettle.inference.engine.protocol import GenerationRequest
from mettle.inference.engine.scheduler import Scheduler
from mettle.records.sampling import SamplingParams
from mettle.records.tokens import filled
from mettle.trainer.config import MicroBatchConfig, MismatchConfig
from mettle.trainer.mismatch.monitor import MismatchMonitor

LAYERS, CHOSEN, EXPERTS = 2, 2, 4


def sampled_batch(folder, learner, dtype, *, is_recording=True):
    """Rollouts of the learner's own weights by an engine that computes in `dtype`."""
    state = {name.removeprefix("network."): tensor for name, tensor in learner.policy.state_dict().items()}
    config = json.loads((folder / "config.json").read_text())
    decoder = make_decoder(config, state, torch.device("cpu"), dtype, 64)
    scheduler = Scheduler(decoder, Limits(32, 64, is_recording_experts=is_recording), seed=3)
    params = SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True)
    prompts = [np.random.default_rng(seed).integers(0, 250, 9).tolist() for seed in range(4)]
    made = run_requests(scheduler, [GenerationRequest(str(i), p, params, 4) for i, p in enumerate(prompts)])
    samples = []
    for prompt, generation in zip(prompts, made, strict=True):
        for number, choice in enumerate(generation.choices):
            length = len(prompt) + len(choice.token_ids)
            columns = filled(length, {"token_ids": np.array([*prompt, *choice.token_ids])})
            columns["experts"] = np.full((length, LAYERS * CHOSEN if is_recording else 0), -1, np.int16)
            own = slice(len(prompt), length)
            columns["loss_mask"][own], columns["rl_weights"][own], columns["versions"][own] = True, 1.0, 0
            columns["logprobs"][own], columns["advantages"][own] = choice.logprobs, number - 1.5
            if is_recording:
                columns["experts"][own] = np.stack(choice.experts)
            samples.append(columns)
    return make_batch(samples)


def mismatch(learner, batch):
    """The mean k3 KL, and the figures of the routers."""
    learner.policy.routers.forget()
    return learner.measure(batch)["mismatch_kl/mean"], learner.policy.routers.figures(ALONE)


def forgetting(batch):
    return dataclasses.replace(batch, experts=batch.experts[:, :0])


def test_replaying_the_engines_experts_takes_most_of_the_mismatch_of_bfloat16(mixture):
    learner = make_learner(mixture)
    with torch.no_grad():  # routers that are less sure of themselves than those of a fresh model cross over more often
        for name, parameter in learner.policy.named_parameters():
            parameter.mul_(8.0 if "experts" in name else 1.0)
    batch = sampled_batch(mixture, learner, torch.bfloat16)
    with_replay, figures = mismatch(learner, batch)
    without, own = mismatch(learner, forgetting(batch))
    assert figures["experts/replayed_share"] == 1.0
    assert own["experts/replayed_share"] == 0.0
    assert 0 < figures["experts/rerouted_share"] < 0.2
    assert with_replay < without / 2, (with_replay, without, figures["experts/rerouted_share"])


@pytest.mark.parametrize("share_prompts", [False, True])
def test_an_engine_of_the_same_precision_records_what_the_trainer_chooses(mixture, share_prompts):
    learner = make_learner(mixture, micro_batch=MicroBatchConfig(share_prompts=share_prompts))
    batch = sampled_batch(mixture, learner, torch.float32)
    kl, figures = mismatch(learner, batch)
    assert kl < 1e-9
    assert figures["experts/rerouted_share"] == 0.0
    assert 1.0 <= figures["experts/max_load"] <= EXPERTS
    assert {f"experts/layer_{i}/{name}" for i in range(LAYERS) for name in ("max_load", "idle_share")} < figures.keys()
    replayed, own = gradients(learner, batch)[0], gradients(learner, forgetting(batch))[0]
    torch.testing.assert_close(replayed, own, rtol=0, atol=1e-7)


def test_a_replayed_choice_is_computed_and_its_gradient_reaches_the_router(mixture):
    """All tokens through experts 2 and 3: the others take nothing, and the router still learns."""
    learner = make_learner(mixture)
    batch = sampled_batch(mixture, learner, torch.float32)
    batch.experts[batch.loss_mask] = np.tile([2, 3], LAYERS)
    first = None
    for checkpointing in (False, True):  # computed again in the backward pass, with the same choice
        learner.policy.checkpoint_activations(checkpointing)
        learner.policy.routers.forget()
        gradient, _ = gradients(learner, batch)
        figures = learner.policy.routers.figures(ALONE)
        assert figures["experts/layer_1/max_load"] == 2.0
        assert figures["experts/idle_share"] == 0.5
        assert figures["experts/rerouted_share"] > 0.3
        router = dict(learner.policy.named_parameters())["network.model.layers.1.mlp.gate.weight"]
        assert router.grad.abs().max() > 0
        first = gradient if first is None else first
        torch.testing.assert_close(gradient, first)


def test_the_monitor_compares_with_the_engines_experts(mixture, tmp_path):
    learner = make_learner(mixture)
    batch = sampled_batch(mixture, learner, torch.float32)
    batch.experts[batch.loss_mask] = np.tile([2, 3], LAYERS)
    monitor = MismatchMonitor(MismatchConfig(tolerance=1e-4), learner, tmp_path, seed=0)
    assert monitor.look(1, batch).cause != "", "these experts are not those that sampled"
    assert monitor.look(1, forgetting(batch)).cause == ""


def test_experts_of_another_model_are_refused(mixture, mini_model):
    learner = make_learner(mixture)
    batch = sampled_batch(mixture, learner, torch.float32)
    wider = dataclasses.replace(batch, experts=np.repeat(batch.experts, 2, axis=1))
    with pytest.raises(StorageError, match="the batch has 8 experts a token, and this model chooses 4"):
        learner.measure(wider)
    dense = make_learner(mini_model)
    assert dense.policy.routers.figures(ALONE) == {}
