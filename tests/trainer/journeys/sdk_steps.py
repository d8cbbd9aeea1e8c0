"""Every step that an SDK's API has, against a service: run by the Python of a client's own environment.

    python sdk_steps.py URL MODEL_NAME [FOLDER_WITH_TORCH]

Prints a JSON object: for each step "ok", "absent" (this version has none) or what went wrong.
"""

import io
import json
import os
import sys
import tarfile
import traceback
import urllib.request
import warnings

warnings.simplefilter("ignore")
if len(sys.argv) > 3:
    sys.path.append(sys.argv[3])  # torch alone comes from there: custom losses are computed by the client
import tinker  # noqa: E402
from tinker import types  # noqa: E402

URL, NAME = sys.argv[1:3]
STEPS = []


class Absent(Exception):
    pass


def step(function):
    STEPS.append(function)
    return function


def has(thing, name):
    if not hasattr(thing, name):
        raise Absent(name)
    return getattr(thing, name)


def done(made):
    """A client: newer versions give futures of them."""
    return made.result() if type(made).__name__.endswith("Future") else made


def tensor(values, dtype):
    return types.TensorData(data=list(values), dtype=dtype, shape=[len(values)])


def datum(text, **inputs):
    ids = list(text.encode())
    inputs = {name: tensor(values, "float32") for name, values in inputs.items()}
    inputs = inputs or {"weights": tensor([1.0] * (len(ids) - 1), "float32")}
    inputs["target_tokens"] = tensor(ids[1:], "int64")
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


TEXT = "hello world"
DATA = [datum(TEXT), datum("goodbye")]
PROMPT = types.ModelInput.from_ints(list(b"hello "))
PARAMS = types.SamplingParams(max_tokens=6, seed=3, temperature=1.0)
adam = types.AdamParams(learning_rate=1e-2)


def loss(client):
    return client.forward(DATA, "cross_entropy").result().metrics["loss:sum"]


def failure_of(future):
    try:
        future.result()
    except tinker.RequestFailedError as error:
        return str(error)
    return "it was taken"


class Run:
    """What the steps hand on."""


run = Run()


@step
def capabilities():
    assert [each.model_name for each in run.service.get_server_capabilities().supported_models] == [NAME]


@step
def create_lora_training_client():
    run.model = done(run.service.create_lora_training_client(base_model=NAME, rank=4, seed=1))


@step
def get_info():
    assert run.model.get_info().model_data.model_name == NAME


@step
def get_tokenizer():
    assert run.model.get_tokenizer().encode("ab") == [97, 98]


@step
def forward():
    run.first = loss(run.model)


@step
def forward_backward_and_optim_step():
    for _ in range(4):
        passed, stepped = run.model.forward_backward(DATA, "cross_entropy"), run.model.optim_step(adam)
        assert len(passed.result().loss_fn_outputs) == 2
        stepped.result()
    assert loss(run.model) < run.first


@step
def chunks_of_one_call():
    found = run.model.forward([DATA[n % 2] for n in range(2100)], "cross_entropy").result()
    assert len(found.loss_fn_outputs) == 2100
    assert abs(found.metrics["loss:sum"] - 1050 * loss(run.model)) < 1.0


@step
def policy_losses():
    length = len(TEXT) - 1
    inputs = {"logprobs": [-5.5] * length, "advantages": [0.5] * length}
    for name in ("importance_sampling", "ppo", "cispo", "dro"):
        run.model.forward_backward([datum(TEXT, **inputs)], name).result()
    run.model.optim_step(adam).result()


@step
def custom_loss():
    try:
        import torch  # noqa: F401
    except ImportError:
        raise Absent("torch") from None
    custom = lambda data, logprobs: (sum(-each.sum() for each in logprobs), {"mine:sum": 1.0})  # noqa: E731
    found = run.model.forward_backward_custom(DATA, custom).result()
    assert found.metrics["mine:sum"] == 1.0
    run.model.optim_step(adam).result()


@step
def save_and_load_state():
    run.path = run.model.save_state("one").result().path
    before = loss(run.model)
    run.model.forward_backward(DATA, "cross_entropy").result()
    run.model.optim_step(types.AdamParams(learning_rate=0.1)).result()
    assert loss(run.model) != before
    run.model.load_state_with_optimizer(run.path).result()
    assert loss(run.model) == before
    run.model.load_state(run.path).result()


@step
def create_training_client_from_state():
    other = done(run.service.create_training_client_from_state(run.path))
    assert loss(other) == loss(run.model)


@step
def create_training_client_from_state_with_optimizer():
    make = has(run.service, "create_training_client_from_state_with_optimizer")
    assert loss(done(make(run.path))) == loss(run.model)


@step
def sampling_client_of_weights_now():
    run.sampler = done(run.model.save_weights_and_get_sampling_client())
    found = run.sampler.sample(prompt=PROMPT, num_samples=2, sampling_params=PARAMS).result()
    assert [len(each.tokens) for each in found.sequences] == [6, 6]
    ids = list(b"hello ") + list(found.sequences[0].tokens)
    whole = types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={
            "target_tokens": tensor(ids[1:], "int64"),
            "weights": tensor([1.0] * (len(ids) - 1), "float32"),
        },
    )
    own = list(run.model.forward([whole], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data)[-6:]
    assert max(abs(a - b) for a, b in zip(own, found.sequences[0].logprobs, strict=True)) < 2e-3


@step
def named_sampler_weights():
    run.sampler_path = run.model.save_weights_for_sampler("final").result().path
    client = done(run.service.create_sampling_client(model_path=run.sampler_path))
    same = [c.sample(prompt=PROMPT, num_samples=1, sampling_params=PARAMS).result() for c in (client, run.sampler)]
    assert same[0].sequences[0].tokens == same[1].sequences[0].tokens


@step
def sampling_client_of_the_base():
    client = done(run.service.create_sampling_client(base_model=NAME))
    assert client.sample(prompt=PROMPT, num_samples=1, sampling_params=PARAMS).result().sequences


@step
def compute_logprobs():
    found = run.sampler.compute_logprobs(PROMPT).result()
    assert found[0] is None
    assert len(found) == 6


@step
def prompt_logprobs():
    found = run.sampler.sample(
        prompt=PROMPT, num_samples=1, sampling_params=PARAMS, include_prompt_logprobs=True, topk_prompt_logprobs=2
    ).result()
    assert [len(row) for row in found.topk_prompt_logprobs[1:]] == [2] * 5


@step
def many_samples_at_once():
    futures = [run.sampler.sample(prompt=PROMPT, num_samples=1, sampling_params=PARAMS) for _ in range(100)]
    assert len({tuple(each.result().sequences[0].tokens) for each in futures}) == 1


@step
def lists():
    run.rest = run.service.create_rest_client()
    runs = run.rest.list_training_runs().result()
    assert run.model.model_id in [each.training_run_id for each in runs.training_runs]
    paths = [each.tinker_path for each in run.rest.list_user_checkpoints().result().checkpoints]
    assert {run.path, run.sampler_path} <= set(paths)
    assert run.rest.list_checkpoints(run.model.model_id).result().checkpoints
    assert run.rest.get_training_run(run.model.model_id).result().lora_rank == 4
    assert run.rest.get_training_run_by_tinker_path(run.path).result().base_model == NAME


@step
def sessions():
    listed = run.rest.list_sessions().result().sessions
    assert run.rest.get_session(listed[0]).result().training_run_ids is not None


@step
def weights_info():
    assert run.rest.get_weights_info_by_tinker_path(run.path).result().lora_rank == 4


@step
def publish_and_ttl():
    run.rest.publish_checkpoint_from_tinker_path(run.path).result()
    run.rest.unpublish_checkpoint_from_tinker_path(run.path).result()
    has(run.rest, "set_checkpoint_ttl_from_tinker_path")(run.path, 7200).result()


@step
def archive():
    url = has(run.rest, "get_checkpoint_archive_url_from_tinker_path")(run.sampler_path).result().url
    with urllib.request.urlopen(url) as answer, tarfile.open(fileobj=io.BytesIO(answer.read())) as tar:
        assert "adapter_model.safetensors" in tar.getnames()


@step
def external_weights():
    path = has(run.model, "save_weights_external")("out").result().path
    found = run.rest.get_external_weights_urls(path).result()
    with urllib.request.urlopen(found.urls["adapter_config.json"]) as answer:
        assert json.load(answer)["peft_type"] == "LORA"


@step
def delete():
    run.rest.delete_checkpoint_from_tinker_path(run.sampler_path).result()
    paths = [each.tinker_path for each in run.rest.list_user_checkpoints().result().checkpoints]
    assert run.sampler_path not in paths


@step
def bad_input_is_told_and_training_goes_on():
    ids = list(range(5))
    wrong = types.Datum(
        model_input=types.ModelInput.from_ints(ids), loss_fn_inputs={"target_tokens": tensor(ids, "int64")}
    )
    assert "weights" in failure_of(run.model.forward_backward([wrong], "cross_entropy"))
    loss(run.model)


def main():
    run.service = tinker.ServiceClient(base_url=URL, api_key=os.environ.get("TINKER_API_KEY", "tml-steps"))
    results = {}
    for each in STEPS:
        try:
            each()
            results[each.__name__] = "ok"
        except Absent as error:
            results[each.__name__] = f"absent: {error}"
        except Exception as error:
            results[each.__name__] = f"{type(error).__name__}: {str(error)[:300]}"
            traceback.print_exc()
    print(json.dumps(results))
    sys.stdout.flush()


main()
