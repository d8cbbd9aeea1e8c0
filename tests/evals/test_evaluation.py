"""Evaluations: what is saved, what an average is over, and going on after an interruption."""

from __future__ import annotations

import asyncio
import contextlib
import json
from itertools import count

import pytest

import mettle.envs as vf
from mettle.errors import StorageError, UserError
from mettle.evals.facts import facts_of_row
from mettle.evals.summary import Summary

ROWS = [{"question": f"q{i}", "answer": str(i), "info": {"i": i}} for i in range(6)]


def half_right(completion, answer):
    return float(completion[-1]["content"] == answer)


def make(rows=ROWS, **fields):
    return vf.SingleTurnEnv(**{"eval_dataset": rows, "rubric": vf.Rubric([half_right]), "env_id": "toy", **fields})


def question(prompt):
    return prompt[-1]["content"].removeprefix("q")


async def test_results_are_saved_in_the_published_format(scripted, tmp_path):
    env = make(pass_threshold=0.5)
    results = await env.evaluate(
        scripted(question),
        "org/m",
        num_examples=3,
        rollouts_per_example=2,
        results_path=tmp_path,
        state_columns=["turn"],
    )
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert rows == json.loads(json.dumps(results.outputs))
    assert list(rows[0]) == [
        *("example_id", "prompt", "completion", "answer", "info", "reward", "error", "timing", "is_completed"),
        *("is_truncated", "stop_condition", "metrics", "tool_defs", "token_usage", "half_right", "num_turns", "turn"),
        "task_key",
    ]
    assert rows[0]["token_usage"] == {
        "input_tokens": 10,
        "output_tokens": 3,
        "final_input_tokens": 10,
        "final_output_tokens": 3,
    }
    assert set(rows[0]["timing"]) == {
        "start_time",
        "setup",
        "generation",
        "scoring",
        "model",
        "env",
        "total",
        "overhead",
    }
    metadata = json.loads((tmp_path / "metadata.json").read_text())
    expected = {"env_id": "toy", "model": "org/m", "base_url": "http://scripted/v1", "num_examples": 3}
    expected |= {"rollouts_per_example": 2, "avg_reward": 1.0, "avg_error": 0.0}
    expected["avg_metrics"] = {"half_right": 1.0, "num_turns": 1.0}
    expected |= {"pass_at_k": {"1": 1.0, "2": 1.0}, "pass_all_k": {"1": 1.0, "2": 1.0}, "state_columns": ["turn"]}
    assert {key: metadata[key] for key in expected} == expected
    assert metadata["version_info"]["vf_version"]


async def test_one_exception_never_ends_the_evaluation_and_is_in_no_average(scripted):
    calls = count()
    client = scripted(lambda prompt: ValueError("boom") if next(calls) == 3 else question(prompt))
    results = await make().evaluate(client, "m")
    errors = [output for output in results.outputs if output["error"]]
    assert len(results.outputs) == 6
    assert len(errors) == 1
    assert errors[0]["reward"] is None
    assert errors[0]["error"]["error"] == "ModelError"
    assert errors[0]["error"]["kind"] == "provider"
    assert errors[0]["error_chain"] == "ModelError -> ValueError"
    assert results.metadata["avg_reward"] == 1.0
    assert results.metadata["avg_error"] == pytest.approx(1 / 6)


async def test_a_model_that_is_down_gives_no_average_at_all(scripted):
    results = await make().evaluate(scripted(lambda _: vf.ModelError("down")), "m")
    assert results.metadata["avg_reward"] is None
    assert results.metadata["avg_error"] == 1.0


async def test_a_resumed_evaluation_runs_what_is_missing_or_failed_and_nothing_else(scripted, tmp_path):
    calls = count()
    first = scripted(lambda prompt: vf.ModelError("down") if next(calls) in (1, 4) else question(prompt))
    await make().evaluate(first, "m", num_examples=4, rollouts_per_example=2, results_path=tmp_path)
    second = scripted(question)
    results = await make().evaluate(second, "m", num_examples=5, rollouts_per_example=2, results_path=tmp_path)
    assert len(second.calls) == 2 + 2
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert sorted(row["example_id"] for row in rows) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert all(row["error"] is None for row in rows)
    assert results.metadata["avg_reward"] == 1.0
    third = scripted(question)
    await make().evaluate(third, "m", num_examples=5, rollouts_per_example=2, results_path=tmp_path)
    assert third.calls == []


async def test_a_cancelled_evaluation_keeps_what_was_finished(scripted, tmp_path):
    is_stuck = asyncio.Event()

    class Stuck(type(scripted("x"))):
        async def get_response(self, prompt, *args, **kwargs):
            if question(prompt) == "2":
                is_stuck.set()
                await asyncio.sleep(3600)
            return await super().get_response(prompt, *args, **kwargs)

    task = asyncio.create_task(make().evaluate(Stuck(question), "m", max_concurrent=1, results_path=tmp_path))
    await is_stuck.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    after = scripted(question)
    results = await make().evaluate(after, "m", results_path=tmp_path)
    assert [question(call["prompt"]) for call in after.calls] == ["2", "3", "4", "5"]
    assert len(results.outputs) == 6


async def test_groups_scored_together_are_repeated_whole(scripted, tmp_path):
    def compared(completions):
        return [float(len(completions))] * len(completions)

    calls = count()
    env = make(rubric=vf.Rubric([compared]))
    first = scripted(lambda _: vf.ModelError("x") if next(calls) == 1 else "a")
    await env.evaluate(first, "m", num_examples=2, rollouts_per_example=3, results_path=tmp_path)
    second = scripted("a")
    results = await env.evaluate(second, "m", num_examples=2, rollouts_per_example=3, results_path=tmp_path)
    assert len(second.calls) == 3
    assert [output["reward"] for output in results.outputs] == [3.0] * 6


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda env, client: env.evaluate_sync(client, "m", num_exmaples=2), r"evaluate\(\) .*'num_exmaples'; did you mean 'num_examples'"),
        (lambda env, client: env.generate_sync(ROWS, client, "m", max_concurent=2), r"generate\(\) .*did you mean 'max_concurrent'"),
        (lambda env, client: env.evaluate_sync(client, "m", colour=2), "no argument 'colour'; there are client, model"),
    ],
)  # fmt: skip
def test_a_misspelt_argument_is_an_error_that_names_the_nearest(scripted, call, message):
    client = scripted(question)
    for kind in (UserError, TypeError):
        with pytest.raises(kind, match=message):
            call(make(), client)
    assert client.calls == []


def test_arguments_of_older_releases_that_mean_nothing_now_are_accepted(scripted):
    results = make().evaluate_sync(
        scripted(question), "m", num_examples=1, save_every=-1, use_tqdm=False, push_to_hf_hub=False, max_concurrent=4
    )
    assert results.reward == [1.0]


async def test_another_evaluation_is_not_resumed(scripted, tmp_path):
    await make().evaluate(scripted(question), "m", results_path=tmp_path)
    with pytest.raises(UserError, match="its model is 'm', this evaluation's is 'other'"):
        await make().evaluate(scripted(question), "other", results_path=tmp_path)


async def test_a_full_disk_ends_the_evaluation_and_says_where(scripted, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(StorageError, match=str(blocked)):
        await make().evaluate(scripted(question), "m", results_path=blocked)


@pytest.mark.parametrize(("independent", "most"), [(False, 4), (True, 2)])
async def test_concurrency_bounds_groups_or_with_independent_scoring_rollouts(scripted, independent, most):
    running, seen, is_full = 0, [], asyncio.Event()

    class Counting(type(scripted("x"))):
        async def get_response(self, prompt, *args, **kwargs):
            nonlocal running
            running += 1
            seen.append(running)
            if running == most:
                is_full.set()
            # As many as may run together do; whoever is late finds the others waiting.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(is_full.wait(), 5)
            await asyncio.sleep(0)
            running -= 1
            return await super().get_response(prompt, *args, **kwargs)

    env = make(rubric=vf.Rubric([half_right]))
    await env.evaluate(
        Counting(question), "m", rollouts_per_example=2, max_concurrent=2, independent_scoring=independent
    )
    assert max(seen) == most


async def test_callbacks_see_start_progress_and_log(scripted):
    seen = []

    async def progress(outputs, new, metadata):
        seen.append((len(outputs), len(new), metadata["avg_reward"]))

    await make().evaluate(
        scripted(question),
        "m",
        num_examples=2,
        rollouts_per_example=2,
        max_concurrent=1,
        on_start=lambda rows, remaining: seen.append(len(rows)),
        on_progress=progress,
        on_log=seen.append,
    )
    assert seen == [4, "2 of 4 rollouts", (2, 2, 1.0), "4 of 4 rollouts", (4, 2, 1.0)]


def test_without_a_loop_and_inside_one(scripted):
    results = make().evaluate_sync(scripted(question), "m", num_examples=2)
    assert results.reward == [1.0, 1.0]
    assert results.completion[0][0]["content"] == "0"

    async def inside():
        return make().evaluate_sync(scripted(question), "m", num_examples=2)

    assert asyncio.run(inside()).reward == [1.0, 1.0]
    with pytest.raises(AttributeError, match="no column 'colour'"):
        _ = results.colour


async def test_rollouts_may_go_unscored(scripted):
    results = await make(score_rollouts=False).evaluate(scripted("x"), "m", num_examples=1)
    assert (results.outputs[0]["reward"], results.outputs[0]["metrics"]) == (0.0, {})


async def test_scoring_that_hangs_is_cut_off(scripted):
    async def forever(completion):
        await asyncio.sleep(3600)

    env = make(rubric=vf.Rubric([forever]), scoring_timeout_seconds=0.02)
    results = await env.evaluate(scripted("x"), "m", num_examples=1)
    assert results.outputs[0]["error"]["kind"] == "timeout"
    assert results.outputs[0]["reward"] is None


async def test_environments_in_a_group_score_their_own_rows(scripted):
    def length(completion):
        return float(len(completion[-1]["content"]))

    inner = vf.EnvGroup([make(rubric=vf.Rubric([length]))], env_names=["lengths"])
    group = vf.EnvGroup([make(ROWS[:2]), inner], env_names=["halves", "nested"])
    results = await group.evaluate(scripted(lambda _: "0"), "m")
    outputs = sorted(results.outputs, key=lambda output: output["example_id"])
    assert [output["reward"] for output in outputs] == [1.0, 0.0] + [1.0] * 6
    assert outputs[0]["metrics"] == {"half_right": 1.0, "length": 0.0, "num_turns": 1.0}
    assert outputs[2]["metrics"] == {"half_right": 0.0, "length": 1.0, "num_turns": 1.0}
    assert group.get_eval_dataset()[2]["info"]["env_id"] == ["nested", "lengths"]
    lost = await group.run_rollout({"prompt": [], "info": {"env_id": "nobody"}}, scripted("x"), "m")
    assert "routed to 'nobody'" in str(lost["error"])
    assert lost["reward"] is None


def test_incomplete_examples_are_left_out_of_pass_at_k():
    summary = Summary(rollouts_per_example=2, pass_threshold=0.5)
    for example_id, reward in [(0, 1.0), (0, 0.0), (1, 0.0)]:
        summary.add(facts_of_row({"example_id": example_id, "reward": reward, "metrics": {}}))
    summary.add(facts_of_row({"example_id": 1, "reward": None, "error": {"error": "x"}}))
    assert summary.metadata()["pass_at_k"] == {"1": 0.5, "2": 1.0}
    assert summary.metadata()["avg_reward"] == 0.25, "each task counts once"
