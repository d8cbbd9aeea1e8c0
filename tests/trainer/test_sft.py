"""Demonstrations and their masks, the warm-up's stop, and the model that it leaves behind."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.trainer.conftest import make_learner

from mettle.clients.chat_template import ChatTemplate
from mettle.clients.renderer import Renderer
from mettle.envs import Rubric, SingleTurnEnv
from mettle.errors import ServiceError, UserError
from mettle.storage.database import Database
from mettle.storage.evals import EvalStore, read_evals
from mettle.storage.ledger import Ledger
from mettle.storage.rollouts import rollout_rows
from mettle.storage.run_dir import RunDir
from mettle.storage.schema import MIGRATIONS
from mettle.storage.shards import ShardWriter
from mettle.trainer.config import ProbeConfig, SchedulerConfig, SftConfig
from mettle.trainer.demonstrations import batch_of, encode_demonstration, read_demonstrations, shuffled_batches
from mettle.trainer.layout import Sequences
from mettle.trainer.probe import EnvironmentProbe, ProbeReading
from mettle.trainer.saves import Saves
from mettle.trainer.sft import WarmUp, replace_model, resolve_probe, warm_up

CHAT = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}]
REWRITING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content if loop.last or m.role == 'user' else '' }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def renderer(mini_model):
    return Renderer.from_directory(mini_model)


@pytest.fixture
def journal(tmp_path):
    ledger = Ledger(tmp_path / "run.db")
    yield ledger.journal
    ledger.close()


class ScriptedProbe:
    """Answers with the rewards it was given, and remembers when it was asked."""

    def __init__(self, *rewards):
        self.rewards = list(rewards)
        self.states = []

    def measure(self, state, *, seed):
        self.states.append({name: tensor.clone() for name, tensor in state.items()})
        return ProbeReading(self.rewards.pop(0), 10, 1)


def test_the_answer_and_its_end_token_train_and_nothing_else(renderer):
    found = encode_demonstration(renderer, CHAT)
    assert found.token_ids.tolist() == [259, 97, 98, 257, 260, 98, 97, 257]
    assert found.is_trained.tolist() == [False] * 5 + [True] * 3


def test_few_shot_answers_are_context_and_every_turn_after_the_last_user_message_trains(renderer):
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]}
    tool = {"role": "tool", "content": "7"}
    found = encode_demonstration(renderer, [*CHAT, CHAT[0], call, tool, {"role": "assistant", "content": "7"}])
    trained = renderer.decode(found.token_ids[found.is_trained], skip_special_tokens=False)
    assert trained == '<tool_call>{"name": "f", "arguments": {}}</tool_call><|end|>7<|end|>'


def test_a_template_that_rewrites_a_turn_is_refused(renderer):
    other = Renderer(renderer._tokenizer, ChatTemplate(REWRITING), renderer.stop_token_ids)
    chat = [CHAT[0], {"role": "assistant", "content": "x"}, {"role": "tool", "content": ""}, CHAT[1]]
    with pytest.raises(UserError, match="rewrites message 1"):
        encode_demonstration(other, chat)
    assert encode_demonstration(other, CHAT).is_trained.sum() == 3


def test_demonstrations_that_do_not_fit_are_named_by_line(tmp_path, renderer):
    path = tmp_path / "demonstrations.jsonl"
    with pytest.raises(UserError, match="is missing"):
        read_demonstrations(path, renderer)
    path.write_text(json.dumps({"messages": CHAT}) + "\n" + json.dumps({"messages": CHAT[:1]}) + "\n")
    with pytest.raises(UserError, match=r"jsonl:2: .*at least one assistant message"):
        read_demonstrations(path, renderer)
    path.write_text("{}\n")
    with pytest.raises(UserError, match=r"jsonl:1 is not a demonstration"):
        read_demonstrations(path, renderer)
    path.write_text(json.dumps({"messages": CHAT}))
    assert len(read_demonstrations(path, renderer)) == 1


def test_a_batch_counts_only_trained_tokens(renderer):
    counts = Sequences.of(batch_of([encode_demonstration(renderer, CHAT)] * 4, 1)).counts
    assert (counts.rl, counts.ce, counts.ref_kl) == (0, 12, 0)


@settings(max_examples=25, deadline=None)
@given(number=st.integers(1, 20), size=st.integers(1, 30), seed=st.integers(0, 99))
def test_every_demonstration_is_seen_once_a_pass(number, size, seed):
    batches = shuffled_batches(list(range(number)), size, seed)
    seen = [item for _ in range(number) for item in next(batches)]
    assert len(seen) == number * size
    assert all(sorted(seen[at : at + number]) == list(range(number)) for at in range(0, len(seen), number))


def config_for(**changes):
    probe = ProbeConfig(first_step=3, interval=2, num_prompts=4)
    settings = {"max_steps": 9, "batch_size": 2, "probe": probe, "scheduler": SchedulerConfig(warmup_steps=2)}
    return SftConfig(**{**settings, **changes})


def test_the_warm_up_stops_at_the_target(mini_model, renderer, journal):
    learner = make_learner(mini_model)
    probe = ScriptedProbe(0.1, 0.3, 0.6)
    done = warm_up(learner, [encode_demonstration(renderer, CHAT)], probe, config_for(), journal)
    assert (done.step, done.reward) == (7, 0.6)
    assert journal.metric("sft/reward") == [(3, 0.1), (5, 0.3), (7, 0.6)]
    losses = [loss for _, loss in journal.metric("sft/loss")]
    assert len(losses) == 7
    assert losses[-1] < losses[0]
    assert len(journal.events(kind="warning")) == 3
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(probe.states[0][name], probe.states[2][name])


class Killed(BaseException):
    """What a kill is to the code that it ends."""


def test_a_warm_up_that_was_killed_continues_as_if_nothing_had_been(mini_model, renderer, journal, tmp_path):
    chats = [encode_demonstration(renderer, [{"role": "user", "content": c}, CHAT[1]]) for c in "abcdefgh"]
    config = config_for().model_copy(update={"batch_size": 2})
    whole = make_learner(mini_model)
    warm_up(whole, chats, ScriptedProbe(0.1, 0.3, 0.6), config, journal)

    def killed(state, *, seed):
        raise Killed

    first, probe = make_learner(mini_model), ScriptedProbe(0.1)
    asked = probe.measure
    probe.measure = lambda state, *, seed: asked(state, seed=seed) if probe.rewards else killed(state, seed=seed)
    with pytest.raises(Killed):
        warm_up(first, chats, probe, config, journal, Saves(tmp_path / "saves", first, 0.0))

    again, rest = make_learner(mini_model), ScriptedProbe(0.3, 0.6)
    saves = Saves(tmp_path / "saves", again, 0.0)
    assert warm_up(again, chats, rest, config, journal, saves).step == 7
    [event] = journal.events(kind="resumed")
    assert event.message == "the warm-up continues after step 4"
    for name, tensor in whole.policy.state_dict().items():
        assert torch.equal(tensor, again.policy.state_dict()[name]), name
    saves.remove()
    assert not (tmp_path / "saves").exists()


def test_a_warm_up_that_misses_its_target_says_so(mini_model, renderer, journal):
    probe = ScriptedProbe(0.1, 0.3, 0.2, 0.25)
    with pytest.raises(ServiceError, match=r"has not reached a reward of 0\.5 in 9 steps \(best measurement 0\.300\)"):
        warm_up(make_learner(mini_model), [encode_demonstration(renderer, CHAT)], probe, config_for(), journal)


def test_the_warm_model_takes_the_place_of_the_old_one(mini_model, tmp_path):
    link = tmp_path / "model"
    link.symlink_to(mini_model)
    learner = make_learner(mini_model)
    with torch.no_grad():
        for parameter in learner.policy.parameters():
            parameter += 1
    old = load_file(mini_model / "model.safetensors")
    replace_model(link, learner, WarmUp(0.5, 10, 128, 1.0))
    assert not link.is_symlink()
    new = load_file(link / "model.safetensors")
    assert new.keys() == old.keys()
    assert all(torch.equal(new[name], old[name] + 1) for name in old)
    assert torch.equal(load_file(mini_model / "model.safetensors")[name := next(iter(old))], old[name])
    assert Renderer.from_directory(link).stop_token_ids == (257,)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def echo_env(reward):
    rows = [{"question": chr(97 + i) * 2, "answer": "x"} for i in range(20)]
    return SingleTurnEnv(dataset=rows, rubric=Rubric(funcs=[reward]))


def test_the_probe_scores_with_the_environments_rubric_and_repeats_by_seed(mini_model, tmp_path):
    lengths = []

    def shortness(completion):
        lengths.append(len(completion[-1]["content"] or ""))
        return 1.0 / (1 + lengths[-1])

    database = Database(RunDir(tmp_path).ledger, MIGRATIONS)
    store = EvalStore(database, ShardWriter(RunDir(tmp_path).rollouts, "probe"))
    probe = EnvironmentProbe(
        mini_model, echo_env(shortness), ProbeConfig(num_prompts=12, max_tokens=6), torch.device("cpu"), store
    )
    state = load_file(mini_model / "model.safetensors")
    first, again, other = (probe.measure(state, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.num_rollouts == 12
    assert first.num_errors == 0
    assert first.mean_reward == pytest.approx(np.mean([1 / (1 + length) for length in lengths[:12]]))
    assert first != other
    kept = read_evals(database)
    assert [(row.kind, row.state, row.num_rollouts, row.mean) for row in kept][:2] == [
        ("probe", "finished", 12, first.mean_reward)
    ] * 2
    assert len(rollout_rows(database, kept[2].eval_id)) == 12
    database.close()


def test_a_failed_rollout_lowers_no_mean(mini_model):
    calls = []

    def sometimes(completion):
        calls.append(1)
        if len(calls) % 2:
            raise RuntimeError("no")
        return 1.0

    config = ProbeConfig(num_prompts=10, max_tokens=2)
    reading = EnvironmentProbe(mini_model, echo_env(sometimes), config, torch.device("cpu")).measure(
        load_file(mini_model / "model.safetensors"), seed=0
    )
    assert reading.mean_reward == 1.0
    assert reading.num_errors > 0


def test_the_probe_takes_the_runs_first_environment_unless_told(make_run):
    run_dir = make_run(shipped=0)
    with pytest.raises(UserError, match="no environment to measure with"):
        resolve_probe(run_dir, ProbeConfig())
    settings = {"envs": [{"id": "reverse-text", "args": {"hard": True}}], "sampling": {"max_tokens": 8}}
    run_dir.config("orchestrator").write_text(json.dumps(settings))
    found = resolve_probe(run_dir, ProbeConfig())
    assert (found.env, found.env_args, found.max_tokens) == ("reverse-text", {"hard": True}, 8)
    told = resolve_probe(run_dir, ProbeConfig(env="arithmetic", max_tokens=3))
    assert (told.env, told.env_args, told.max_tokens) == ("arithmetic", {}, 3)
