"""The configuration refuses what cannot learn, and says what to change."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from mettle.orchestrator.config import OrchestratorConfig


def made(**values):
    return OrchestratorConfig.model_validate({"envs": [{"id": "words"}], **values})


def test_the_defaults_are_a_usable_run():
    config = made()
    assert (config.groups_per_batch, config.inflight_groups) == (16, 16)
    assert config.envs[0].name == "words"
    assert config.eval_envs == config.envs
    assert config.eval_sampling == config.sampling


@pytest.mark.parametrize(
    ("values", "advice"),
    [
        ({"group_size": 1}, "set group_size to at least 2"),
        ({"group_size": 1, "algorithm": "max_rl"}, "set group_size to at least 2"),
        ({"batch_size": 100, "group_size": 16}, "take 96 or 112"),
        ({"max_lag": 2, "max_staleness": 1}, "raise max_staleness to at least 2"),
        ({"sampling": {"top_p": 0.9}}, "leave them at 1, -1 and 0"),
        ({"sampling": {"top_k": 50}}, "leave them at 1, -1 and 0"),
        ({"sampling": {"min_p": 0.1}}, "leave them at 1, -1 and 0"),
        ({"sampling": {"temperature": 0.0}}, "take 1.0"),
        ({"algorithm": "ppo"}, "there are clipped_negatives, dapo"),
        ({"algorithm": "reference_kl"}, r"add a table \[orchestrator.services.reference\]"),
        ({"envs": [{"id": "words", "algorithm": "ppo"}]}, "there is no algorithm 'ppo'"),
        ({"envs": [{"id": "words", "algorithm_args": {"decay": 0.5}}]}, "name it in `algorithm`"),
        ({"services": {"reference": {"model": "m"}}}, "Field required"),
        ({"algorithm_args": {"clip": 1}}, "takes no option 'clip'"),
        (
            {"algorithm_args": {"scale_by_std": "no"}},
            "scale_by_std = 'no' of algorithm 'grpo': input should be a valid b",
        ),
        ({"algorithm": "distillation", "algorithm_args": {"top_k": 4}}, r"\[orchestrator.services.teacher\]"),
        ({"algorithm": "self_distillation", "sampling": {"temperature": 0.7}}, "scores at temperature 1"),
        ({"services": {"policy": {"base_url": "http://x/v1", "model": "m"}}}, "that is the run's own engine"),
        (
            {
                "envs": [
                    {"id": "a", "algorithm": "distillation"},
                    {"id": "b", "algorithm": "self_distillation", "algorithm_args": {"top_k": 4}},
                ]
            },
            "give all a top_k, or none",
        ),
        ({"envs": []}, "at least 1 item"),
        ({"envs": [{"id": "a/words"}, {"id": "b/words@1.0"}]}, "several environments are called words"),
        ({"seq_len": 1}, "greater than or equal to 2"),
        ({"curriculum": {"sampler": "difficulty_pool", "hard_below": 0.8}}, "must be less than easy_above"),
        ({"curriculum": {"admit_above": 0.5, "admit_below": 0.5}}, "or no group is admitted"),
        ({"max_stepz": 3}, "Extra inputs"),
        ({"retry": {"retried": ["provder"]}}, "no kind of error 'provder'; there are rollout, provider, environment"),
        ({"solved_reward": float("nan")}, "finite number"),
        ({"curriculum": {"admit_above": float("inf")}}, "finite number"),
        ({"sampling": {"top_k": -5}}, "greater than or equal to -1"),
        ({"curriculum": {"easy_weight": 0.5}}, r"easy_weight \(0.5\) is the difficulty_pool's: set sampler to"),
        ({"eval": {"envs": [{"id": "words", "ratio": 2}]}}, "ratio of 'words' is of training"),
        ({"eval": {"envs": [{"id": "words", "algorithm": "rloo"}]}}, "algorithm of 'words' is of training"),
        ({"eval": {"envs": [{"id": "words", "curriculum": {}}]}}, "curriculum of 'words' is of training"),
        ({"services": {"judge": {"base_url": "127.0.0.1:8000", "model": "m"}}}, "is no address of a server"),
    ],
)
def test_what_cannot_learn_is_refused_with_advice(values, advice):
    with pytest.raises(ValidationError, match=advice):
        made(**values)


def test_an_environment_may_have_an_algorithm_of_its_own():
    config = made(
        algorithm="max_rl",
        envs=[{"id": "words"}, {"id": "chat", "algorithm": "reference_kl", "algorithm_args": {"weight": 0.5}}],
        services={"reference": {"base_url": "http://127.0.0.1:1/v1", "model": "big"}},
    )
    words, chat = config.envs
    assert config.choice_for(words, provides_advantages=False) == ("max_rl", {})
    assert config.choice_for(words, provides_advantages=True) == ("environment", {})
    assert config.choice_for(chat, provides_advantages=True) == ("reference_kl", {"weight": 0.5})


def test_the_policy_is_a_service_that_is_always_there():
    assert made(algorithm="self_distillation").kinds_of_teaching == {""}
    assert made(algorithm="distillation", sampling={"temperature": 0.7}).kinds_of_teaching == {"whole"}


def test_an_environment_may_have_a_curriculum_of_its_own():
    config = made(
        envs=[{"id": "words"}, {"id": "chat", "curriculum": {"sampler": "difficulty_pool", "admit_below": 0.9}}],
        curriculum={"admit_above": 0.1},
    )
    assert config.curriculum_of("words").admit_above == 0.1
    assert (config.curriculum_of("chat").admit_above, config.curriculum_of("chat").admit_below) == (None, 0.9)


def test_truncating_samplers_are_fine_in_evaluations():
    config = made(eval={"sampling": {"top_p": 0.9, "temperature": 0.0}})
    assert config.eval_sampling.is_truncating


def test_the_configuration_imports_without_torch():
    code = "import sys, mettle.orchestrator.config; sys.exit('torch' in sys.modules or 'aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
