"""What every engine promises, held against each of them: whoever writes another adds it to `ENGINES`.

`mock` answers from memory, so what needs a model is asked of the others.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from policies import (
    END,
    make_model,
    picked_logprobs,
    publish,
    publish_adapter,
    reference_logprobs,
    save_adapter,
    save_policy,
    tiny_config,
    with_adapter,
)
from served import KEYS, served
from transformers import PreTrainedModel

from mettle.clients.renderer import Renderer
from mettle.errors import MettleError
from mettle.inference.config import InferenceConfig, VllmSettings
from mettle.inference.engine.embedded import EmbeddedEngine, start_engine
from mettle.inference.engine.mock import MockEngine
from mettle.inference.engine.protocol import (
    EngineBusy,
    EngineStopped,
    Generation,
    GenerationRequest,
    RequestRefused,
    SamplingEngine,
    TokenEvent,
    WeightsRejected,
)
from mettle.inference.launch import open_engine
from mettle.inference.remote import RemoteEngine
from mettle.inference.replicated import ReplicatedEngine, Serving
from mettle.processes.child import import_path
from mettle.records.sampling import Constraint, SamplingParams

WAIT_S = 100.0
PROMPT = (1, 2, 3)
TOLERANCE = 1e-4


class Heard:
    """A listener that keeps what it hears and counts the ends."""

    def __init__(self, enough: int = 1_000_000) -> None:
        self.events: list[TokenEvent] = []
        self.ends: list[Generation | MettleError] = []
        self.has_ended = threading.Event()
        self.has_enough = threading.Event()
        self._enough = enough

    def on_token(self, event: TokenEvent) -> None:
        assert not self.ends, "a token came after the end"
        self.events.append(event)
        if len(self.events) >= self._enough:
            self.has_enough.set()

    def on_finish(self, generation: Generation) -> None:
        self._end(generation)

    def on_failure(self, error: MettleError) -> None:
        self._end(error)

    def _end(self, outcome: Generation | MettleError) -> None:
        self.ends.append(outcome)
        self.has_ended.set()
        self.has_enough.set()

    def outcome(self) -> Generation | MettleError:
        assert self.has_ended.wait(WAIT_S), "the request did not end"
        assert len(self.ends) == 1
        return self.ends[0]

    def failure(self) -> MettleError:
        found = self.outcome()
        assert isinstance(found, MettleError), found
        return found

    def answer(self) -> Generation:
        found = self.outcome()
        assert isinstance(found, Generation), found
        return found


@dataclass
class Bench:
    """An engine under test. `has_model` is False for one that makes its answers up."""

    engine: SamplingEngine
    model: PreTrainedModel
    has_model: bool = True
    hold: Callable[[], None] = lambda: None
    names: int = 0

    def ask(self, *, prompt: tuple[int, ...] = PROMPT, enough: int = 1_000_000, **asked: Any) -> Heard:
        fields = {name: asked.pop(name) for name in list(asked) if name in GenerationRequest.__slots__}
        self.names += 1
        heard = Heard(enough)
        wanted = GenerationRequest(f"request-{self.names}", prompt, SamplingParams(**asked), **fields)
        self.engine.submit(wanted, heard)
        return heard

    def greedy(self, **asked: Any) -> Generation:
        return self.ask(temperature=0.0, max_tokens=8, ignore_eos=True, **asked).answer()

    def needs_model(self) -> None:
        if not self.has_model:
            pytest.skip("it has no model")

    def publish(self, model: PreTrainedModel, root: Path, version: int, **changes: Any) -> Path:
        return publish(model, root, version, **changes)


Build = Callable[[ExitStack, Path, PreTrainedModel, Renderer], Bench]


def embedded_engine(folder: Path, renderer: Renderer) -> EmbeddedEngine:
    config = InferenceConfig(model=folder, max_slots=8, max_queue=8, seed=0)
    return start_engine(config, eos_token_ids=renderer.stop_token_ids, decode_text=renderer.visible_text)


def embedded(_: ExitStack, folder: Path, model: PreTrainedModel, renderer: Renderer) -> Bench:
    return Bench(embedded_engine(folder, renderer), model)


def mock(_: ExitStack, __: Path, model: PreTrainedModel, ___: Renderer) -> Bench:
    return Bench(MockEngine(max_queue=8, answer=lambda ids, choice: [*ids, *ids, 9]), model, has_model=False)


def remote(stack: ExitStack, folder: Path, model: PreTrainedModel, renderer: Renderer) -> Bench:
    base_url = stack.enter_context(served(embedded_engine(folder, renderer), renderer))
    return Bench(RemoteEngine(base_url, admin_key=KEYS.admin, api_key=KEYS.api), model)


def replicated(_: ExitStack, folder: Path, model: PreTrainedModel, renderer: Renderer) -> Bench:
    def start(serving: Serving) -> SamplingEngine:
        return embedded_engine(folder, renderer)

    return Bench(ReplicatedEngine([start, start], Serving(None, 0)), model)


def vllm_engine(folder: Path, renderer: Renderer, settings: VllmSettings, logs: Path) -> SamplingEngine:
    config = InferenceConfig(
        model=folder, engine="vllm", vllm=settings, max_slots=8, max_queue=8, max_model_len=256, seed=0
    )
    return open_engine(config, eos_token_ids=renderer.stop_token_ids, decode_text=renderer.visible_text, logs=logs)


SHARED = ("vllm", "vllm-stand-in")
"""Engines that start too slowly to be started for each test: they get their first weights back after each."""
STAND_IN = Path(__file__).parents[1] / "vllm" / "stand_in"
VLLM_ARGS = ("--enforce-eager", "--max-num-batched-tokens", "64")  # longer prompts come in parts
VLLM_ENV = "METTLE_TEST_VLLM"
"""The interpreter of an environment that has the real package (docs/how-to/serve-with-vllm.md says how to make it)."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model(tiny_config(head_dim=32))  # vLLM's attention on CPUs has no kernel for less


@pytest.fixture(scope="module")
def other_model() -> PreTrainedModel:
    return make_model(tiny_config(head_dim=32), seed=1)


@pytest.fixture(scope="module")
def policy_folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(model, tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def started(
    policy_folder: Path, renderer: Renderer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], SamplingEngine]]:
    """Starts a shared engine at its first use."""
    running: dict[str, SamplingEngine] = {}

    def start(name: str) -> SamplingEngine:
        if name not in running:
            if name == "vllm":
                settings = VllmSettings(python=Path(os.environ[VLLM_ENV]), args=VLLM_ARGS, lora_rank=4)
            else:
                path = os.pathsep.join([str(STAND_IN), import_path()])
                settings = VllmSettings(python=Path(sys.executable), lora_rank=4, environment={"PYTHONPATH": path})
            running[name] = vllm_engine(policy_folder, renderer, settings, tmp_path_factory.mktemp(name))
        return running[name]

    yield start
    for engine in running.values():
        engine.close()


ENGINES: dict[str, Build] = {"embedded": embedded, "mock": mock, "remote": remote, "replicated": replicated}


@pytest.fixture(
    params=[
        *ENGINES,
        "vllm-stand-in",
        pytest.param(
            "vllm",
            marks=[
                pytest.mark.nightly,
                pytest.mark.skipif(not os.environ.get(VLLM_ENV), reason=f"{VLLM_ENV} names no interpreter"),
            ],
        ),
    ]
)
def bench(
    request: pytest.FixtureRequest, policy_folder: Path, model: PreTrainedModel, renderer: Renderer, tmp_path: Path
) -> Iterator[Bench]:
    if request.param in SHARED:
        engine = request.getfixturevalue("started")(request.param)
        yield Bench(engine, model)
        if engine.status().is_alive and engine.status().version != 0:
            engine.update_weights(publish(model, tmp_path, 0), 0)
        return
    with ExitStack() as stack:
        made = ENGINES[request.param](stack, policy_folder, model, renderer)
        stack.callback(made.engine.close)
        yield made


def test_all_of_a_choice_is_as_long_as_its_tokens(bench: Bench) -> None:
    generation = bench.ask(n=3, max_tokens=5, ignore_eos=True, top_logprobs=2).answer()
    assert generation.num_prompt_tokens == len(PROMPT)
    assert [choice.index for choice in generation.choices] == [0, 1, 2]
    for choice in generation.choices:
        assert len(choice.token_ids) == len(choice.logprobs) == len(choice.versions) == len(choice.top_logprobs) == 5
        assert (choice.finish_reason, set(choice.versions)) == ("length", {0})


def test_what_is_heard_token_by_token_is_what_comes_at_the_end(bench: Bench) -> None:
    heard = bench.ask(n=2, max_tokens=6, ignore_eos=True, has_token_events=True)
    for choice in heard.answer().choices:
        events = [event for event in heard.events if event.choice == choice.index]
        assert [event.token_id for event in events] == choice.token_ids
        assert [event.logprob for event in events] == choice.logprobs
        assert [event.version for event in events] == choice.versions
        assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + [choice.finish_reason]


def test_greedy_tokens_and_logprobs_are_the_model_s(bench: Bench) -> None:
    bench.needs_model()
    generation = bench.greedy(prompt_logprobs=True, top_logprobs=3)
    [choice] = generation.choices
    whole = [*PROMPT, *choice.token_ids]
    reference = reference_logprobs(bench.model, whole)
    assert choice.token_ids == reference.argmax(-1)[len(PROMPT) - 1 :].tolist()
    expected = picked_logprobs(bench.model, whole)
    assert generation.prompt_logprobs is not None
    assert generation.prompt_logprobs[0] is None
    scored = torch.tensor(generation.prompt_logprobs[1:])
    assert torch.allclose(scored, expected[: len(PROMPT) - 1], atol=TOLERANCE)
    assert generation.prompt_top_logprobs is not None
    assert generation.prompt_top_logprobs[0] == []
    listed = torch.topk(reference[: len(PROMPT) - 1], 3, -1)
    ids = [[other.token_id for other in top] for top in generation.prompt_top_logprobs[1:]]
    assert ids == listed.indices.tolist()
    told = torch.tensor([[other.logprob for other in top] for top in generation.prompt_top_logprobs[1:]])
    assert torch.allclose(told, listed.values, atol=TOLERANCE)
    best = torch.topk(reference[len(PROMPT) - 1 :], 3, -1)
    found = torch.tensor([[other.logprob for other in top] for top in choice.top_logprobs])
    assert torch.allclose(found, best.values, atol=TOLERANCE)
    assert [[other.token_id for other in top] for top in choice.top_logprobs] == best.indices.tolist()


def test_the_logprobs_are_those_of_the_distribution_that_was_sampled_from(bench: Bench) -> None:
    bench.needs_model()
    for temperature in (1.0, 0.7):
        [choice] = bench.ask(max_tokens=8, ignore_eos=True, temperature=temperature, seed=3).answer().choices
        whole = torch.tensor([[*PROMPT, *choice.token_ids]])
        with torch.no_grad():
            logits = bench.model(whole).logits[0, len(PROMPT) - 1 : -1].float() / temperature
        expected = torch.log_softmax(logits, -1).gather(1, whole[0, len(PROMPT) :, None])[:, 0]
        assert torch.allclose(torch.tensor(choice.logprobs), expected, atol=TOLERANCE)


def test_a_seed_repeats_and_each_choice_draws_its_own(bench: Bench) -> None:
    bench.needs_model()
    first, again = (bench.ask(n=3, max_tokens=8, ignore_eos=True, seed=5).answer() for _ in range(2))
    drawn = [tuple(choice.token_ids) for choice in first.choices]
    assert drawn == [tuple(choice.token_ids) for choice in again.choices]
    assert len(set(drawn)) == 3
    assert bench.ask(max_tokens=8, ignore_eos=True, seed=6).answer().choices[0].token_ids != first.choices[0].token_ids


def test_a_seed_repeats_behind_a_prompt_that_is_computed_in_parts_beside_others(bench: Bench) -> None:
    bench.needs_model()
    prompt = tuple(range(1, 201))
    others = [bench.ask(max_tokens=100, ignore_eos=True, seed=n) for n in range(3)]
    first = bench.ask(prompt=prompt, max_tokens=8, ignore_eos=True, seed=5).answer().choices[0]
    for heard in others:
        heard.answer()
    alone = bench.ask(prompt=prompt, max_tokens=8, ignore_eos=True, seed=5).answer().choices[0]
    assert alone.token_ids == first.token_ids
    expected = picked_logprobs(bench.model, [*prompt, *alone.token_ids])[len(prompt) - 1 :]
    assert torch.allclose(torch.tensor(alone.logprobs), expected, atol=TOLERANCE)


def test_choices_with_seeds_of_their_own_come_as_if_asked_one_by_one(bench: Bench) -> None:
    bench.needs_model()
    together = bench.ask(n=2, max_tokens=8, ignore_eos=True, seeds=(11, 12)).answer()
    alone = [bench.ask(max_tokens=8, ignore_eos=True, seed=seed).answer() for seed in (11, 12)]
    assert [c.token_ids for c in together.choices] == [g.choices[0].token_ids for g in alone]


def test_stop_tokens_and_stop_strings_end_a_choice_and_are_in_it(bench: Bench, renderer: Renderer) -> None:
    bench.needs_model()
    ids = bench.greedy().choices[0].token_ids
    [by_token] = bench.ask(temperature=0.0, max_tokens=8, ignore_eos=True, stop_token_ids=(ids[3],)).answer().choices
    assert by_token.token_ids == ids[: ids.index(ids[3]) + 1]
    assert (by_token.finish_reason, by_token.stop) == ("stop", None)
    text = renderer.visible_text(ids)
    stop = next(character for character in text if character.isascii())
    [by_text] = bench.ask(temperature=0.0, max_tokens=8, ignore_eos=True, stop=(stop,)).answer().choices
    assert (by_text.finish_reason, by_text.stop) == ("stop", stop)
    assert stop in renderer.visible_text(by_text.token_ids)
    assert by_text.token_ids == ids[: len(by_text.token_ids)]


def test_the_end_token_ends_a_choice_unless_it_is_ignored(bench: Bench) -> None:
    bench.needs_model()
    asked = [bench.ask(n=8, max_tokens=100, temperature=2.0, seed=seed) for seed in range(2)]
    choices = [choice for heard in asked for choice in heard.answer().choices]
    ended = [choice for choice in choices if choice.finish_reason == "stop"]
    assert ended, "no choice of these seeds drew the end token"
    assert all(choice.token_ids[-1] == END and END not in choice.token_ids[:-1] for choice in ended)


def test_no_tokens_scores_the_prompt(bench: Bench) -> None:
    generation = bench.ask(max_tokens=0, prompt_logprobs=True).answer()
    assert generation.choices[0].token_ids == []
    assert generation.choices[0].finish_reason == "length"
    assert generation.prompt_logprobs is not None
    assert len(generation.prompt_logprobs) == len(PROMPT)


@pytest.mark.parametrize(
    ("asked", "parameter"),
    [
        ({"prompt": ()}, "prompt_ids"),
        ({"prompt": (1, 264)}, "prompt_ids"),
        ({"prompt": (1,) * 256}, "prompt_ids"),
        ({"n": 9_999}, "n"),
        ({"n": 2, "seeds": (1,)}, "seeds"),
        ({"temperature": 1e-9}, "temperature"),
    ],
)
def test_what_can_never_run_is_refused_at_once_and_never_heard_of(
    bench: Bench, asked: dict[str, Any], parameter: str
) -> None:
    with pytest.raises(RequestRefused) as refused:
        bench.ask(max_tokens=4, **asked)
    assert refused.value.parameter == parameter
    assert bench.engine.status().num_waiting + bench.engine.status().num_running == 0


def test_a_request_that_is_aborted_ends_once_with_what_it_has(bench: Bench) -> None:
    bench.needs_model()
    heard = bench.ask(n=2, max_tokens=200, ignore_eos=True, has_token_events=True, enough=10)
    assert heard.has_enough.wait(WAIT_S)
    bench.engine.abort("request-1")
    bench.engine.abort("nobody")
    generation = heard.answer()
    assert {choice.finish_reason for choice in generation.choices} <= {"abort", "length"}
    for choice in generation.choices:
        told = [e.token_id for e in heard.events if e.choice == choice.index and e.token_id is not None]
        assert told == choice.token_ids


def test_a_whole_answer_that_is_aborted_brings_home_what_there_is(bench: Bench) -> None:
    bench.needs_model()
    bench.engine.pause("keep")
    heard = bench.ask(max_tokens=200, ignore_eos=True)
    bench.engine.abort("request-1")
    bench.engine.resume()
    assert heard.answer().choices[0].finish_reason == "abort"


def test_a_pause_keeps_what_runs_and_a_resume_goes_on(bench: Bench) -> None:
    bench.needs_model()
    asked = [bench.ask(max_tokens=120, ignore_eos=True, has_token_events=True, enough=3, seed=i) for i in range(4)]
    for heard in asked:
        assert heard.has_enough.wait(WAIT_S)
    bench.engine.pause("keep")
    assert bench.engine.status().is_paused
    late = bench.ask(max_tokens=2, ignore_eos=True)
    bench.engine.resume()
    for heard in asked:
        assert len(heard.answer().choices[0].token_ids) == 120
    assert len(late.answer().choices[0].token_ids) == 2
    assert not bench.engine.status().is_paused


def test_a_drain_lets_what_runs_finish(bench: Bench) -> None:
    bench.needs_model()
    asked = [bench.ask(max_tokens=30, ignore_eos=True, has_token_events=True, enough=1) for _ in range(3)]
    for heard in asked:
        assert heard.has_enough.wait(WAIT_S)
    bench.engine.pause("drain")
    assert all(len(heard.answer().choices[0].token_ids) == 30 for heard in asked)
    bench.engine.resume()


def test_new_weights_come_under_what_runs_and_each_token_says_which(
    bench: Bench, other_model: PreTrainedModel, tmp_path: Path
) -> None:
    bench.needs_model()
    models = [bench.model, other_model]
    has_mixed = False
    for version in range(1, 9):  # on a busy host a request may be over before the update begins
        old_model, new_model = models[(version + 1) % 2], models[version % 2]
        folder = bench.publish(new_model, tmp_path, version)
        asked = [bench.ask(max_tokens=240, ignore_eos=True, has_token_events=True, enough=2, seed=i) for i in range(4)]
        for heard in asked:
            assert heard.has_enough.wait(WAIT_S)
        update = bench.engine.update_weights(folder, version)
        assert (update.version, bench.engine.status().version) == (version, version)
        assert update.canary is not None
        assert update.canary.max_abs_diff < 1e-4
        for heard in asked:
            [choice] = heard.answer().choices
            assert (len(choice.token_ids), choice.versions) == (240, sorted(choice.versions))
            old = choice.versions.count(version - 1)
            assert old + choice.versions.count(version) == 240
            has_mixed = has_mixed or 0 < old < 240
            # Before the switch a token is exactly the old model's; after it, the new one's over the old keys.
            expected = picked_logprobs(old_model, [*PROMPT, *choice.token_ids[:old]])[len(PROMPT) - 1 :]
            assert torch.allclose(torch.tensor(choice.logprobs[:old]), expected, atol=TOLERANCE)
            if old < 240:
                after = picked_logprobs(old_model, [*PROMPT, *choice.token_ids[: old + 1]])[-1]
                assert abs(float(after) - choice.logprobs[old]) > TOLERANCE, "the switch was earlier than it says"
        [fresh] = bench.greedy().choices
        assert set(fresh.versions) == {version}
        assert fresh.token_ids == reference_logprobs(new_model, [*PROMPT, *fresh.token_ids]).argmax(-1)[2:].tolist()
        if has_mixed:
            return
    pytest.fail("no update came under a running request")


def test_weights_that_fail_their_canary_are_refused_and_the_old_ones_stay(
    bench: Bench, other_model: PreTrainedModel, tmp_path: Path
) -> None:
    bench.needs_model()
    before = bench.greedy().choices[0]
    wrong = bench.publish(other_model, tmp_path, 1, canary_offset=0.5)
    with pytest.raises(WeightsRejected) as refused:
        bench.engine.update_weights(wrong, 1)
    assert refused.value.canary is not None
    assert refused.value.canary.mean_abs_diff == pytest.approx(0.5, abs=0.01)
    after = bench.greedy().choices[0]
    assert (after.token_ids, set(after.versions)) == (before.token_ids, {0})
    assert bench.engine.status().version == 0


def test_a_folder_that_is_no_publication_is_refused(bench: Bench, other_model: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(WeightsRejected):
        bench.engine.update_weights(tmp_path / "v1", 1)
    with pytest.raises(WeightsRejected, match="2"):
        bench.engine.update_weights(publish(other_model, tmp_path, 2), 1)
    assert bench.engine.status().version == 0


def test_an_adapter_samples_under_its_own_version_and_the_base_stays(bench: Bench, tmp_path: Path) -> None:
    bench.needs_model()
    before = bench.greedy().choices[0].token_ids
    folder = save_adapter(bench.model, tmp_path / "adapter")
    update = bench.engine.load_adapter("mine", folder)
    [served] = bench.engine.status().adapters
    assert (served.name, served.rank, served.newest) == ("mine", 4, update.version)
    [choice] = bench.greedy(adapter="mine").choices
    merged = with_adapter(bench.model, folder)
    reference = reference_logprobs(merged, [*PROMPT, *choice.token_ids])[len(PROMPT) - 1 :]
    assert choice.token_ids == reference.argmax(-1).tolist()
    assert choice.versions == [update.version] * 8
    assert torch.allclose(torch.tensor(choice.logprobs), reference.amax(-1), atol=TOLERANCE)
    assert bench.greedy().choices[0].token_ids == before
    bench.engine.unload_adapter("mine")
    with pytest.raises(RequestRefused):  # at once, or to the listener from the other side of a wire
        raise bench.ask(adapter="mine", max_tokens=2).failure()


def test_an_update_may_be_an_adapter_of_the_base_and_only_the_newest_is_kept(
    bench: Bench, policy_folder: Path, tmp_path: Path
) -> None:
    bench.needs_model()
    for version in (1, 2):
        adapter = save_adapter(bench.model, tmp_path / f"adapter-{version}", seed=version)
        folder = publish_adapter(bench.model, adapter, policy_folder, tmp_path, version)
        running = bench.ask(max_tokens=200, ignore_eos=True, has_token_events=True, enough=2)
        assert running.has_enough.wait(WAIT_S)
        update = bench.engine.update_weights(folder, version)
        assert (update.version, bench.engine.status().version) == (version, version)
        assert update.canary is not None
        assert update.canary.max_abs_diff < 1e-4
        [choice] = bench.greedy().choices
        reference = reference_logprobs(with_adapter(bench.model, adapter), [*PROMPT, *choice.token_ids])[2:]
        assert choice.token_ids == reference.argmax(-1).tolist()
        assert choice.versions == [version] * 8
        [old] = running.answer().choices  # under what it began with, or under the new one from a token on
        assert (len(old.versions), old.versions) == (200, sorted(old.versions))
        assert set(old.versions) <= {version - 1, version}
    wrong = publish_adapter(bench.model, adapter, policy_folder, tmp_path, 3, canary_offset=0.5)
    with pytest.raises(WeightsRejected):
        bench.engine.update_weights(wrong, 3)
    assert bench.greedy().choices[0].token_ids == choice.token_ids
    assert bench.engine.status().version == 2
    assert bench.engine.status().adapters == ()


def test_biases_and_penalties_move_what_is_sampled_and_its_logprobs(bench: Bench) -> None:
    bench.needs_model()
    plain = bench.greedy().choices[0].token_ids
    [banned] = bench.greedy(logit_bias=((plain[0], -100.0),)).choices
    reference = reference_logprobs(bench.model, [*PROMPT, *banned.token_ids])[len(PROMPT) - 1 :]
    reference[:, plain[0]] -= 100
    assert banned.token_ids == reference.argmax(-1).tolist()
    assert torch.allclose(torch.tensor(banned.logprobs), reference.log_softmax(-1).amax(-1), atol=TOLERANCE)
    [apart] = bench.greedy(presence_penalty=0.5, frequency_penalty=0.7, repetition_penalty=1.3).choices
    with torch.no_grad():
        logits_TV = bench.model(torch.tensor([[*PROMPT, *apart.token_ids]])).logits[0, len(PROMPT) - 1 : -1].float()
    for at, logits_V in enumerate(logits_TV):
        counts_V = torch.bincount(torch.tensor(apart.token_ids[:at], dtype=torch.int64), minlength=len(logits_V))
        seen_V = (counts_V > 0) | (torch.bincount(torch.tensor(PROMPT), minlength=len(logits_V)) > 0)
        moved_V = torch.where(seen_V, torch.where(logits_V > 0, logits_V / 1.3, logits_V * 1.3), logits_V)
        moved_V = moved_V - 0.7 * counts_V - 0.5 * (counts_V > 0)
        assert apart.token_ids[at] == int(moved_V.argmax())
        assert abs(float(moved_V.log_softmax(-1).max()) - apart.logprobs[at]) < TOLERANCE


@pytest.mark.parametrize(
    ("constraint", "is_kept"),
    [
        (Constraint("choice", '["left", "right"]'), lambda text: text in ("left", "right")),
        (Constraint("regex", "[0-4]{3}"), lambda text: re.fullmatch("[0-4]{3}", text)),
        (Constraint("grammar", 'start: "a" | "b" start'), lambda text: re.fullmatch("b*a", text)),
        (
            Constraint("json", '{"type": "object", "properties": {"a": {"enum": [1, 23]}}, "required": ["a"],'
                       ' "additionalProperties": false}'),
            lambda text: json.loads(text) in ({"a": 1}, {"a": 23}),
        ),
    ],
    ids=["choice", "regex", "grammar", "json"],
)  # fmt: skip
def test_a_choice_that_ends_has_kept_to_its_constraint(
    bench: Bench, renderer: Renderer, constraint: Constraint, is_kept: Callable[[str], object]
) -> None:
    bench.needs_model()
    pytest.importorskip("llguidance", reason="the extra 'grammar' has it")
    free = bench.ask(max_tokens=60, ignore_eos=True, seed=1)
    choices = bench.ask(n=4, max_tokens=100, seed=2, constraint=constraint).answer().choices
    assert len(free.answer().choices[0].token_ids) == 60
    ended = [choice for choice in choices if choice.finish_reason == "stop"]
    assert ended, [renderer.visible_text(choice.token_ids) for choice in choices]
    for choice in ended:
        assert choice.token_ids[-1] == END
        assert is_kept(renderer.visible_text(choice.token_ids[:-1])), renderer.visible_text(choice.token_ids)


def test_a_grammar_that_is_none_is_refused_in_one_line(bench: Bench) -> None:
    bench.needs_model()
    pytest.importorskip("llguidance", reason="the extra 'grammar' has it")
    with pytest.raises(RequestRefused) as refused:  # at once, or to the listener from the other side of a wire
        raise bench.ask(max_tokens=4, constraint=Constraint("regex", "(")).failure()
    assert "\n" not in str(refused.value)
    assert bench.greedy().choices[0].token_ids


def test_a_full_queue_says_so(bench: Bench) -> None:
    """At once, or to the listener where the queue is on the other side of a wire."""
    bench.engine.pause("keep")
    asked: list[Heard] = []
    num_refused = 0
    for _ in range(100):
        try:
            asked.append(bench.ask(max_tokens=2, ignore_eos=True))
        except EngineBusy:
            num_refused += 1
    bench.engine.resume()
    outcomes = [heard.outcome() for heard in asked]
    num_refused += sum(isinstance(outcome, EngineBusy) for outcome in outcomes)
    assert num_refused + sum(isinstance(outcome, Generation) for outcome in outcomes) == 100
    assert 0 < num_refused < 100


def test_after_the_end_everything_has_ended_once(bench: Bench) -> None:
    bench.engine.pause("keep")
    asked = [bench.ask(max_tokens=50, ignore_eos=True) for _ in range(4)]
    bench.engine.close()
    for heard in asked:
        outcome = heard.outcome()
        assert isinstance(outcome, MettleError) or outcome.choices[0].finish_reason == "abort"
    assert not bench.engine.status().is_alive
    with pytest.raises(EngineStopped):
        bench.ask(max_tokens=2)
    bench.engine.close()
