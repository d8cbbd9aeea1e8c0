"""What parts of a run's config do not go together is refused, and the line says what to change."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from mettle.runs.config import RunConfig

VLLM = {"engine": "vllm", "vllm": {"python": "/usr/bin/python3"}}
REMOTE = {"engine": "remote", "remote": {"urls": ["http://127.0.0.1:8000/v1"]}}


def made(orchestrator=None, **tables):
    wanted = {"envs": [{"id": "reverse-text"}], **(orchestrator or {})}
    return RunConfig.model_validate({"orchestrator": wanted, **tables})


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        (
            {"deployment": {"num_trainer_ranks": 3}, "trainer": {"context_parallel": 2}},
            r"context_parallel 2 does not divide deployment\.num_trainer_ranks 3: each group has equally many",
        ),
        (
            {"deployment": {"num_trainer_ranks": 6}, "trainer": {"num_replicas": 2, "context_parallel": 2}},
            "num_replicas 2 times context_parallel 2 does not divide",
        ),
        (
            {"trainer": {"cpu_offload": True, "device": "cuda"}},
            r"several ranks: leave it out, or raise deployment\.num_t",
        ),
        (
            {"trainer": {"keep_versions": 3}, "orchestrator": {"max_staleness": 3}},
            r"keep_versions 3 must exceed orchestrator\.max_staleness 3: a version is kept while its tokens may",
        ),
        ({"orchestrator": {"algorithm": "distillation"}}, "wants a teacher's whole distribution, and the trainer has"),
        (
            {"inference": {"outside": {"max_lag": 3}}},
            r"outside\.max_lag 3 is more than orchestrator\.max_staleness 2",
        ),
        ({"model": {"lora": {"rank": 64}}, "inference": {**VLLM, "vllm": {**VLLM["vllm"], "lora_rank": 16}}},
         r"lora_rank 16 is less than the run's own model\.lora\.rank 64; leave it out"),
        ({"trainer": {"loss": {"ratio": "none"}}}, r"ratio 'none' .*max_staleness 2 lets older ones in: set max_lag"),
        ({"trainer": {"loss": {"type": "dro", "kl_tau": 0}}}, "nothing but this penalty holds dro near the sampler"),
        ({"trainer": {"distillation": {"divergence": "jsd"}}}, "divergence 'jsd' is for nothing"),
        ({"trainer": {"distillation": {"jsd_weight": 0.3}}}, "jsd_weight 0.3 is of divergence 'jsd', and this is 'rev"),
        ({"trainer": {"scheduler": {"decay_steps": 5}}}, "decay_steps 5 is of a decay, and type is 'constant'"),
        ({"trainer": {"scheduler": {"min_lr_ratio": 0.1}}}, "min_lr_ratio 0.1 is of a decay"),
        ({"warm_up": {"demonstrations": "x.jsonl"}}, "of a warm-up, which nobody has asked for: say enabled = true"),
        ({"warm_up": {"sft": {"target_reward": 0.4}}}, "of a warm-up, which nobody has asked for: say enabled = true"),
        (
            {"warm_up": {"enabled": True, "sft": {"max_steps": 20}}},
            r"sft\.probe\.first_step 30 is beyond sft\.max_steps 20: nothing would be measured",
        ),
        (
            {"warm_up": {"enabled": True, "sft": {"probe": {"env_args": {"seed": 3}}}}},
            "env_args are of an environment of the probe's own: name it in `env`",
        ),
        (
            {"orchestrator": {"max_lag": 0, "max_staleness": 0, "min_inflight_groups": 2}},
            r"min_inflight_groups \(2\) is of runs in which tokens may be stale",
        ),
        ({"orchestrator": {"share": "s"}}, r"orchestrator\.share is the run's own; say deployment\.share"),
        ({"deployment": {"engine": "ray", "share": "s"}}, r"deployment\.share is of one machine"),
        ({"deployment": {"engine": "ray"}, "inference": REMOTE}, "names servers that run already"),
        ({"inference": {"model": "/m"}}, r"inference\.model '/m' would be ignored: a run serves and trains the policy of \["),
        ({"inference": {"version": 3}}, r"inference\.version '3' would be ignored"),
        ({"inference": {"weights": "/w"}}, r"inference\.weights '/w' would be ignored"),
        ({"trainer": {"model": "/m"}}, r"trainer\.model '/m' would be ignored"),
        ({"orchestrator": {"model": "/m"}}, r"orchestrator\.model '/m' would be ignored"),
        ({"inference": {"served_model_name": "mine"}}, r"'mine' is not what requests ask for .*'policy'\): set both"),
        ({"orchestrator": {"served_model_name": "mine"}}, r"'policy' is not what requests ask for .*'mine'\): set both"),
        ({"inference": {**REMOTE, "max_slots": 3}}, r"inference\.max_slots 3 is for an engine that the run starts"),
        ({"inference": {**REMOTE, "device": "cpu"}}, r"inference\.device 'cpu' is for an engine that the run starts"),
        ({"inference": {**VLLM, "device": "cuda"}}, r"device is the embedded engine's; say it in vllm\.args"),
        ({"inference": {**VLLM, "record_experts": True}}, r"record_experts is the embedded engine's"),
        ({"inference": {**VLLM, "reuse_sampled": True}}, r"reuse_sampled is the embedded engine's"),
        ({"trainer": {"weight_broadcast_host": "10.0.0.1"}}, "is of a broadcast, and weight_broadcast is 'file'"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_with_what_to_change(tables, said):
    with pytest.raises(ValidationError, match=said):
        made(**tables)


def test_what_goes_together_is_taken():
    assert made(deployment={"num_trainer_ranks": 4}, trainer={"num_replicas": 2, "context_parallel": 2})
    assert made(trainer={"keep_versions": 4}, orchestrator={"max_staleness": 3})
    room = made(model={"lora": {"rank": 64}}, inference=VLLM).inference.vllm
    assert room is not None
    assert room.lora_rank == 64


def test_what_an_engine_beside_others_has_a_use_for_is_taken():
    audited = {"outside": {"max_lag": 1}, "device": "cpu", "kv_cache_share": 0.1}
    assert made(inference={**VLLM, **audited}).inference.device == "cpu"
    assert made(inference={**REMOTE, **audited, "max_slots": 3}).inference.max_slots == 3
    named = made({"served_model_name": "mine"}, inference={"served_model_name": "mine"})
    assert named.inference.served_model_name == "mine"
    assert made(trainer={"weight_broadcast": "gloo", "weight_broadcast_host": "10.0.0.1"})


def test_what_is_off_by_a_word_of_its_own_may_be_set_up():
    assert not made(warm_up={"enabled": False, "sft": {"target_reward": 0.4}}).warm_up.enabled
    assert not made(seed=3).warm_up.enabled, "the seed is everybody's"
    synchronous = {"max_lag": 0, "max_staleness": 0}
    assert made(synchronous, trainer={"loss": {"ratio": "none"}})
    assert made(synchronous, trainer={"loss": {"type": "dro", "kl_tau": 0}})


def test_a_model_that_is_there_is_not_made_too(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValidationError, match=r"preset 'small' is made from nothing, and path .* name one of the two"):
        made(model={"path": tmp_path, "preset": "small"})


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"trainer": {"loss": {"type": "dro"}, "scheduler": {"type": "cosine", "decay_steps": 5}}},
        {
            "orchestrator": {
                "curriculum": {"sampler": "difficulty_pool", "easy_weight": 0.5},
                "eval": {"num_examples": 3},
            }
        },
    ],
)
def test_a_resolved_config_is_taken_as_it_was_given(tables):
    config = made(**tables)
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
