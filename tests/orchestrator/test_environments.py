"""Real environments over real HTTP: what comes back is what was sampled."""

import asyncio
import os
import re
import signal

import pytest

from mettle.envs import load_environment
from mettle.envs.workers.endpoints import ClientCache
from mettle.errors import ProviderError, UserError
from mettle.evals.source import GroupRequest
from mettle.inference.engine.protocol import WeightsRejected
from mettle.orchestrator import environments
from mettle.orchestrator.admission import Admission
from mettle.orchestrator.algorithms import RunAlgorithms
from mettle.orchestrator.config import OrchestratorConfig, RetryConfig
from mettle.orchestrator.environments import EnvironmentSource, sampling_args
from mettle.orchestrator.loop import algorithms_of
from mettle.orchestrator.rollouts import sampling_params
from mettle.orchestrator.server import EndpointFile, HttpPolicyServer
from mettle.orchestrator.services import InMemoryServices
from mettle.records.sampling import SamplingParams
from mettle.records.tasks import GroupRecord, TaskDraw
from mettle.records.versions import WeightVersion


@pytest.fixture
async def source(run_dir, stand_in, settings):
    config = OrchestratorConfig.model_validate(settings)
    made = EnvironmentSource(config, EndpointFile(run_dir.endpoint("inference")), run_dir.model)
    yield made
    await made.close()


def request(size=4, **values):
    return GroupRequest("words", 0, "t1", size, SamplingParams(max_tokens=8), **values)


async def test_a_group_is_one_request_and_its_records_hold_the_sampled_tokens(source, stand_in):
    stand_in.version = 3
    rollouts = await source.run_group(request())
    assert [body["n"] for body in stand_in.requests] == [4]
    assert stand_in.requests[0]["max_tokens"] == 8
    assert [r.rollout_id for r in rollouts] == ["t1-0", "t1-1", "t1-2", "t1-3"]
    for rollout in rollouts:
        (turn,) = rollout.turns
        assert turn.new_prompt_ids.tolist() == stand_in.requests[0]["prompt_ids"]
        said = bytes(turn.completion_ids[:-1].tolist()).decode()
        assert rollout.messages[-1]["content"] == said
        assert rollout.version_range == (3, 3)
        assert (rollout.reward == 1.0) == (said == rollout.answer)
        assert rollout.error_kind is None


@pytest.fixture
async def in_workers(run_dir, stand_in, settings):
    config = OrchestratorConfig.model_validate({**settings, "env_workers": 2, "rollout_timeout_s": 50.0})
    made = EnvironmentSource(config, EndpointFile(run_dir.endpoint("inference")), run_dir.model)
    yield made
    await made.close()


def test_an_environment_that_is_not_mettle_s_own_runs_in_a_worker_process_unless_it_is_asked_for_here(settings):
    asked = [
        {"id": "words"},
        {"id": "words", "name": "here", "workers": 0},
        {"id": "reverse-text"},
        {"id": "arithmetic", "workers": 2},
        {"id": "somebody/others@1.0"},
    ]
    del settings["env_workers"]
    config = OrchestratorConfig.model_validate({**settings, "envs": asked})
    assert [environments.num_workers_of(env, config) for env in config.envs] == [1, 0, 0, 2, 1]
    config = OrchestratorConfig.model_validate({**settings, "envs": asked, "env_workers": 3})
    assert [environments.num_workers_of(env, config) for env in config.envs] == [3, 0, 3, 2, 3]


async def test_a_group_in_a_worker_process_is_the_same_group(in_workers, source, stand_in):
    assert [in_workers.num_tasks("words", is_eval=is_eval) for is_eval in (False, True)] == [50, 10]
    assert in_workers.uid("words", 7) == source.uid("words", 7)
    assert source.uid("words", 0, is_eval=True) != source.uid("words", 0)  # held-out rows are other tasks
    stand_in.version = 3
    rollouts = await in_workers.run_group(request())
    assert [body["n"] for body in stand_in.requests] == [4]
    for rollout in rollouts:
        (turn,) = rollout.turns
        assert turn.new_prompt_ids.tolist() == stand_in.requests[0]["prompt_ids"]
        said = bytes(turn.completion_ids[:-1].tolist()).decode()
        assert (rollout.messages[-1]["content"], rollout.version_range) == (said, (3, 3))
        assert (rollout.reward == 1.0) == (said == rollout.answer)
        assert rollout.error_kind is None
    assert await source.run_group(request(1, is_eval=True))
    assert not in_workers.provides_advantages("words")
    figures = in_workers.figures()
    assert figures["env_workers/words/rss_max_mib"] > 10
    assert (figures["env_workers/words/deaths"], figures["env_workers/words/lag_max_ms"] < 60_000) == (0.0, True)
    assert source.figures() == {}


async def test_groups_of_a_worker_that_is_killed_are_finished_by_another(in_workers, stand_in):
    stand_in.delay_s = 1.0
    groups = [asyncio.create_task(in_workers.run_group(request())) for _ in range(6)]
    pool = in_workers._train["words"].pool
    async with asyncio.timeout(100):
        while len(stand_in.requests) < 6:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    os.kill(max(pool.stats, key=lambda worker: worker.num_running).pid, signal.SIGKILL)
    rollouts = [rollout for group in await asyncio.gather(*groups) for rollout in group]
    assert pool.num_deaths == 1
    assert [rollout.error_kind for rollout in rollouts] == [None] * 24
    assert all(rollout.turns for rollout in rollouts)


async def test_the_time_limit_holds_in_workers_too(run_dir, stand_in, settings):
    config = OrchestratorConfig.model_validate({**settings, "env_workers": 1, "rollout_timeout_s": 2.0})
    source = EnvironmentSource(config, EndpointFile(run_dir.endpoint("inference")), run_dir.model)
    stand_in.delay_s = 5.0
    rollouts = await source.run_group(request(2))
    assert {(r.error_kind, r.reward) for r in rollouts} == {("timeout", None)}
    await source.close()


async def test_the_advantages_of_an_environment_that_provides_them_are_those_that_train(
    run_dir, stand_in, settings, monkeypatch
):
    def load(name, **args):
        env = load_environment(name, **args)

        class Shaped(type(env)):
            provides_advantages = True

            async def run_group(self, *args, **kwargs):
                states = await super().run_group(*args, **kwargs)
                for position, state in enumerate(states):
                    state["trajectory"][0]["advantage"] = position - 1.25
                return states

        env.__class__ = Shaped
        return env

    monkeypatch.setattr(environments, "load_environment", load)
    config = OrchestratorConfig.model_validate(settings)
    source = EnvironmentSource(config, EndpointFile(run_dir.endpoint("inference")), run_dir.model)
    assert source.provides_advantages("words")
    choice = config.choice_for(config.envs[0], provides_advantages=True)
    group = GroupRecord(TaskDraw(1, "words", "u", 0, 0), 0, await source.run_group(request()))
    admission = Admission(
        RunAlgorithms({"words": choice}), InMemoryServices(), RetryConfig(), seq_len=64, filter_zero_advantages=True
    )
    verdict = await admission.judge(group, {})
    assert [r.advantage for r in verdict.group.rollouts] == [-1.25, -0.25, 0.75, 1.75]
    samples = admission.samples_of(verdict.group)
    assert [set(s.advantages[s.loss_mask].tolist()) for s in samples] == [{-1.25}, {-0.25}, {0.75}, {1.75}]
    await source.close()


def test_advantages_are_not_taken_from_an_environment_that_gives_none():
    class Source:
        def provides_advantages(self, env):
            return env == "shaped"

    config = OrchestratorConfig.model_validate({"envs": [{"id": "shaped"}, {"id": "words"}]})
    assert [type(algorithms_of(config, Source()).of(env.name)).__name__ for env in config.envs] == [
        "EnvironmentAdvantages",
        "GRPO",
    ]
    asked = config.model_copy(update={"algorithm": "environment"})
    with pytest.raises(UserError, match=r"'words' gives none .*take another algorithm, as grpo"):
        algorithms_of(asked, Source())


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"top_p": 0.9}, "top_p = 0.9"),
        ({"extra_body": {"top_k": 20, "min_p": 0.1}}, "min_p = 0.1, top_k = 20"),
        ({"presence_penalty": 0.5}, "presence_penalty = 0.5"),
        ({"logit_bias": {"7": -100}}, "logit_bias = {'7': -100}"),
    ],
)
def test_an_environment_that_brings_another_distribution_is_refused(run_dir, settings, monkeypatch, own, words):
    def load(name, **args):
        env = load_environment(name, **args)
        env.sampling_args |= own
        return env

    monkeypatch.setattr(environments, "load_environment", load)
    config = OrchestratorConfig.model_validate({**settings, "eval": {"num_examples": 0}})
    with pytest.raises(UserError, match=re.escape(f"environment 'words' samples with {words} of its own")):
        EnvironmentSource(config, EndpointFile(run_dir.endpoint("inference")), run_dir.model)


@pytest.mark.parametrize("own", [{"top_p": 0.5}, {"temperature": 0.2}, {"frequency_penalty": 1.0}])
async def test_a_call_from_another_distribution_fails_in_training_and_stands_in_evaluation(
    run_dir, stand_in, settings, monkeypatch, own
):
    def load(name, **args):
        env = load_environment(name, **args)

        class Choosy(type(env)):
            async def get_model_response(self, state, prompt, **given):
                return await super().get_model_response(
                    state, prompt, **given, sampling_args={**state["sampling_args"], **own}
                )

        env.__class__ = Choosy
        return env

    monkeypatch.setattr(environments, "load_environment", load)
    config = OrchestratorConfig.model_validate(settings)
    source = EnvironmentSource(config, EndpointFile(run_dir.endpoint("inference")), run_dir.model)
    for rollout in await source.run_group(request()):
        assert rollout.error_kind == "environment"
        assert "must be drawn from the policy's own distribution at the run's temperature (1)" in rollout.error
    assert stand_in.requests == []
    assert [r.error_kind for r in await source.run_group(request(2, is_eval=True))] == [None, None]
    await source.close()


async def test_a_worker_is_told_what_its_samples_are_for(in_workers):
    cache = ClientCache()
    for trains_at in (None, 0.7):
        assert cache.client(in_workers.client_of(in_workers._train["words"], trains_at)).trains_at == trains_at
    await cache.close()


async def test_environments_know_when_a_group_is_ended_so_that_a_judge_which_hangs_is_given_up_before(
    run_dir, settings, in_workers
):
    config = OrchestratorConfig.model_validate({**settings, "rollout_timeout_s": 40.0})
    source = EnvironmentSource(config, EndpointFile(run_dir.endpoint("inference")), run_dir.model)
    assert source._train["words"].group_timeout_seconds == 40.0
    await source.close()
    env = in_workers._train["words"]
    assert env.group_timeout_seconds == env.pool.spec.settings["group_timeout_seconds"] == 50.0


async def test_training_and_evaluation_have_their_own_tasks(source):
    assert source.num_tasks("words") == 50
    assert source.num_tasks("words", is_eval=True) == 10
    (rollout,) = await source.run_group(request(1, is_eval=True))
    assert rollout.reward is not None


async def test_an_engine_that_is_gone_gives_rollouts_with_a_provider_error(source, stand_in, monkeypatch):
    stand_in.stop()
    for client in [source._connect(1.0)]:
        monkeypatch.setattr(client.transport, "_sleep", _no_sleep)
    rollouts = await source.run_group(request(2))
    assert {r.error_kind for r in rollouts} == {"provider"}
    assert all(r.reward is None for r in rollouts)


async def test_a_restarted_engine_is_found_at_its_new_address(source, stand_in):
    await source.run_group(request(2))
    stand_in.stop()
    stand_in.start()
    rollouts = await source.run_group(request(2))
    assert all(r.error_kind is None for r in rollouts)


async def test_a_straggler_times_out_and_is_not_scored(run_dir, stand_in, settings):
    config = OrchestratorConfig.model_validate({**settings, "rollout_timeout_s": 0.2})
    source = EnvironmentSource(config, EndpointFile(run_dir.endpoint("inference")), run_dir.model)
    stand_in.delay_s = 5.0
    rollouts = await source.run_group(request(2))
    assert {(r.error_kind, r.reward) for r in rollouts} == {("timeout", None)}
    await source.close()


def test_an_unknown_argument_is_the_users_mistake(run_dir, settings):
    settings["envs"][0]["args"] = {"num_trains": 3}
    config = OrchestratorConfig.model_validate(settings)
    with pytest.raises(UserError, match="num_trains"):
        EnvironmentSource(config, EndpointFile(run_dir.endpoint("inference")), run_dir.model)


def test_sampling_arguments_leave_out_defaults():
    assert sampling_args(SamplingParams()) == {"temperature": 1.0}
    values = {"temperature": 0.5, "max_tokens": 3, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "seed": 1}
    config = OrchestratorConfig.model_validate({"envs": [{"id": "x"}], "eval": {"sampling": values}})
    assert sampling_args(sampling_params(config.eval_sampling)) == {
        "temperature": 0.5, "max_tokens": 3, "top_p": 0.9, "seed": 1, "extra_body": {"top_k": 4, "min_p": 0.1},
    }  # fmt: skip


async def test_the_engine_is_updated_and_asked_over_http(run_dir, stand_in):
    engine = HttpPolicyServer(EndpointFile(run_dir.endpoint("inference")))
    before = await engine.health()
    stand_in.canary_diff = 1e-7
    update = await engine.update(WeightVersion(2, "weights/v2", "d"))
    assert (update.version, update.canary.mean_abs_diff, update.canary.num_tokens) == (2, 1e-7, 64)
    after = await engine.health()
    assert (before.version, after.version) == (0, 2)
    assert before.incarnation == after.incarnation
    await engine.close()


async def test_refused_weights_say_why(run_dir, stand_in):
    engine = HttpPolicyServer(EndpointFile(run_dir.endpoint("inference")))
    stand_in.canary_diff = 0.3
    with pytest.raises(WeightsRejected, match=r"refused v2 \(409\): canary differs by 0.3"):
        await engine.update(WeightVersion(2, "weights/v2", "d"))
    await engine.close()


async def test_an_engine_that_never_came_up_is_a_provider_error(run_dir):
    engine = HttpPolicyServer(EndpointFile(run_dir.endpoint("inference")))
    with pytest.raises(ProviderError, match="no inference server has said where it listens"):
        await engine.health()


async def _no_sleep(_):
    return
