"""Frozen models over HTTP: a served policy scores what another one sampled, and pulls it; what else may answer."""

import asyncio

import numpy as np
import pytest
import torch
from aiohttp import web
from pydantic import TypeAdapter
from tests.inference.started import started

from mettle.clients.renderer import Renderer
from mettle.errors import ProviderError, RolloutError, UserError
from mettle.orchestrator.admission import judge_group
from mettle.orchestrator.algorithms import make_algorithm
from mettle.orchestrator.batcher import ReadyGroup
from mettle.orchestrator.config import FrozenModelConfig, RetryConfig
from mettle.orchestrator.samples import group_samples
from mettle.orchestrator.server import EndpointFile
from mettle.orchestrator.services import HttpModel, HttpServices, OwnModel
from mettle.orchestrator.shipping import assemble
from mettle.records.tasks import GroupRecord, RolloutRecord, TaskDraw, Turn
from mettle.storage.files import write_json
from mettle.trainer.config import MicroBatchConfig, OptimConfig, SchedulerConfig
from mettle.trainer.learner import Learner, Recipe
from mettle.trainer.loading import load_policy
from mettle.trainer.losses.default import DefaultLoss
from mettle.trainer.policy import write_policy
from mettle.trainer.presets import PolicyConfig
from mettle.trainer.publish import compute_canary
from mettle.trainer.world import World

MINI = PolicyConfig(
    num_layers=2, hidden_size=32, mlp_size=48, num_heads=2, num_kv_heads=1, head_dim=16, init_std=0.4, seed=1
)
ALONE = World(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """(folder, base URL) of a policy behind the embedded engine, in a process of its own."""
    folder = tmp_path_factory.mktemp("teacher")
    model = write_policy(folder / "model", MINI)
    with started(folder, model=model, served_model_name="teacher", max_slots=64) as (_, endpoint):
        yield model, endpoint["base_url"]


def canary(learner_or_policy, sequences):
    return compute_canary(learner_or_policy, sequences, ALONE).logprobs


@pytest.fixture
async def services(teacher):
    made = HttpServices({"reference": HttpModel("reference", base_url=teacher[1], model="teacher", max_concurrency=32)})
    yield made
    await made.close()


async def test_a_served_model_scores_ids_as_the_trainer_does(teacher, services):
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 256, n).astype(np.int64) for n in (9, 1, 30)]
    model = services.model("reference")
    found = await asyncio.gather(*(model.logprobs(ids.astype(np.int32)) for ids in sequences))
    expected = canary(load_policy(teacher[0], ALONE, dtype=torch.float32), sequences)
    for scored, row, ids in zip(found, expected, sequences, strict=True):
        np.testing.assert_allclose(scored, row[: len(ids)], atol=1e-4)


async def test_a_served_model_lists_the_tokens_that_it_would_likeliest_have_put(teacher, services, tmp_path):
    ids = np.random.default_rng(1).integers(0, 256, 9).astype(np.int32)
    with torch.no_grad():
        network = load_policy(teacher[0], ALONE, dtype=torch.float32).network
        logits = network(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
    values, expected = torch.log_softmax(logits, -1).topk(5)
    write_json(tmp_path / "endpoint.json", {"base_url": teacher[1]})
    own = OwnModel(EndpointFile(tmp_path / "endpoint.json"), "teacher")
    for model in (services.model("reference"), own):
        listed, logprobs = await model.likeliest(ids, 5)
        np.testing.assert_array_equal(listed[1:], expected[:-1])
        np.testing.assert_allclose(logprobs[1:], values[:-1], atol=1e-4)
        assert not np.isfinite(logprobs[0]).any()
    np.testing.assert_allclose((await own.logprobs(ids))[1:], logits.log_softmax(-1)[range(8), ids[1:]], atol=1e-4)
    await own.close()


@pytest.mark.e2e
async def test_a_policy_is_pulled_towards_a_served_one(tmp_path, teacher, services):
    """On-policy distillation from the credit to the weights, on what the policy samples itself."""
    student = MINI.model_copy(update={"seed": 2, "init_std": 0.02})
    learner = Learner(
        load_policy(write_policy(tmp_path / "student", student), ALONE, dtype=torch.float32),
        Recipe(OptimConfig(lr=2e-2, weight_decay=0.0), SchedulerConfig(), DefaultLoss(), MicroBatchConfig(), 100),
        ALONE,
    )
    algorithm = make_algorithm("reference_kl", {})
    rng = np.random.default_rng(0)
    gaps = []
    for step in range(1, 17):
        group = GroupRecord(TaskDraw(step, "e", "u", 0, 0), step - 1, tuple(sampled(learner, rng, step, 64)))
        verdict = await judge_group(
            group, algorithm, services, retry=RetryConfig(), failures={}, filter_zero_advantages=True
        )
        assert verdict.is_admitted
        assert all(r.credit is not None and r.advantage is None for r in verdict.group.rollouts)
        samples = group_samples(verdict.group, seq_len=64, keep_zero_advantages=False)
        metrics = learner.train(assemble(step, [ReadyGroup.of(step, samples)]), step)
        assert metrics["tokens/trained"] == 64 * 2
        assert metrics["loss/rl"] == metrics["loss/ce"] == 0
        # The loss is the mean of -(ref - l) r at r = 1: the estimate of KL(policy || reference).
        gap = np.mean([s.logprobs[s.loss_mask] - s.ref_logprobs[s.loss_mask] for s in samples])
        assert metrics["loss/ref_kl"] == pytest.approx(gap, abs=1e-3)
        gaps.append(metrics["loss/ref_kl"])
    assert np.mean(gaps[-3:]) < 0.75 * np.mean(gaps[:3]), gaps


def sampled(learner, rng, step, number):
    """Rollouts of one prompt and two sampled tokens, with the logprobs that the policy gives them."""
    prompt = np.array([65, 66, 67], np.int64)
    network = learner.policy.network
    ids = torch.from_numpy(np.tile(prompt, (number, 1)))
    generator = torch.Generator().manual_seed(step)
    logprobs = []
    with torch.no_grad():
        for _ in range(2):
            distribution = torch.log_softmax(network(input_ids=ids).logits[:, -1].float(), -1)
            chosen = torch.multinomial(distribution.exp(), 1, generator=generator)
            logprobs.append(distribution.gather(1, chosen))
            ids = torch.cat([ids, chosen], 1)
    scored = torch.cat(logprobs, 1).numpy()
    for i in range(number):
        turn = Turn(
            0, prompt.astype(np.int32), ids[i, 3:].numpy().astype(np.int32), scored[i], np.full(2, step - 1, np.int32)
        )
        yield RolloutRecord(f"r{i}", 0.0, {}, [], (turn,))


@pytest.fixture
async def stand_in():
    """An endpoint that answers whatever it is told to; `asked` are the requests."""
    answers, asked = {}, []

    async def completions(request):
        asked.append(await request.json())
        return web.json_response(answers["body"], status=answers.get("status", 200))

    app = web.Application()
    app.add_routes([web.post("/v1/completions", completions)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    model = HttpModel("teacher", base_url=f"http://127.0.0.1:{runner.addresses[0][1]}/v1", model="big")
    yield answers, asked, model
    await model.close()
    await runner.cleanup()


def saying(*logprobs):
    return {"choices": [{"logprobs": {"token_logprobs": list(logprobs)}}]}


async def test_ids_are_asked_for_as_they_stand_and_a_token_too_many_is_left_out(stand_in):
    answers, asked, model = stand_in
    answers["body"] = saying(None, -1.0, -2.0, -0.1)
    found = await model.logprobs(np.array([5, 6, 7], np.int32))
    assert found.tolist() == [0, -1, -2]
    assert asked == [
        {"model": "big", "prompt": [5, 6, 7], "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 1.0}
    ]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"choices": [{"text": "hi", "logprobs": None}]}, "does not tell the logprobs of a prompt"),
        ({"choices": []}, "does not tell the logprobs of a prompt"),
        (saying(None, -1.0), "gave 2 logprobs for 3 tokens"),
        (saying(None, -1.0, None), "does not tell|not finite"),
    ],
)
async def test_an_answer_that_scores_nothing_is_the_services_fault(stand_in, body, why):
    answers, _, model = stand_in
    answers["body"] = body
    with pytest.raises(ProviderError, match=why):
        await model.logprobs(np.array([5, 6, 7], np.int32))


async def test_a_refusal_is_a_rollout_error_that_names_the_address(stand_in):
    answers, _, model = stand_in
    answers |= {"status": 400, "body": {"error": {"message": "no echo here"}}}
    with pytest.raises(RolloutError, match="no echo here"):
        await model.logprobs(np.array([5, 6, 7], np.int32))


def calling_its_tokens(*tokens):
    return {"choices": [{"logprobs": {"tokens": list(tokens), "token_logprobs": [None]}}]}


@pytest.mark.parametrize(
    "tokens", [["ab", " cd"], ["ab", "\u2581cd"], ["\u2581ab", "\u2581cd"], ["ab", " cd", "more"]], ids=str
)
async def test_a_teacher_to_which_the_ids_are_the_same_text_is_taken(stand_in, tokens):
    answers, asked, model = stand_in
    answers["body"] = calling_its_tokens(*tokens)
    await model.check_vocabulary([5, 6], "ab cd")
    assert asked[0]["prompt"] == [5, 6]


async def test_a_teacher_with_another_tokenizer_is_refused(stand_in):
    answers, _, model = stand_in
    answers["body"] = calling_its_tokens("x", "yz")
    with pytest.raises(UserError, match=r"'teacher' \(big at .*another tokenizer.*ids of 'ab cd' are 'xyz' to it"):
        await model.check_vocabulary([5, 6], "ab cd")


async def test_a_teacher_that_does_not_say_its_tokens_or_is_not_up_is_no_reason_to_end_a_run(stand_in, caplog):
    answers, _, model = stand_in
    answers["body"] = saying(None, -1.0)
    services = HttpServices({"teacher": model})
    await services.check_vocabularies(lambda text: [5, 6])
    assert "could not be asked" not in caplog.text
    answers |= {"status": 400, "body": {"error": {"message": "no echo here"}}}
    await services.check_vocabularies(lambda text: [5, 6])
    assert "'teacher' could not be asked for its vocabulary" in caplog.text


async def test_before_a_run_is_made_a_teacher_must_answer_with_scores(stand_in):
    answers, _, model = stand_in
    services = HttpServices({"teacher": model})
    answers["body"] = saying(None, -1.0)
    await services.check_answers([5, 6], "ab cd")
    answers["body"] = {"choices": [{"text": "hi", "logprobs": None}]}
    with pytest.raises(
        UserError, match=r"'teacher' cannot be asked: .*logprobs of a prompt.*mend orchestrator\.services"
    ):
        await services.check_answers([5, 6], "ab cd")
    answers |= {"status": 404, "body": {"error": {"message": "there is no model 'big'"}}}
    with pytest.raises(UserError, match="there is no model 'big'"):
        await services.check_answers([5, 6], "ab cd")


async def test_a_served_policy_has_the_vocabulary_of_its_kind(services, teacher):
    await services.check_vocabularies(Renderer.from_directory(teacher[0]).encode)
    with pytest.raises(UserError, match="another tokenizer"):
        await services.check_vocabularies(lambda text: [ord(letter) + 1 for letter in text])


def test_a_service_is_made_from_its_table():
    made = TypeAdapter(dict[str, FrozenModelConfig]).validate_python(
        {"teacher": {"base_url": "http://127.0.0.1:1/v1", "model": "big"}}
    )
    services = HttpServices({name: HttpModel(name, **config.model_dump()) for name, config in made.items()})
    assert isinstance(services.model("teacher"), HttpModel)
