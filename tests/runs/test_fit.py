"""A model that cannot fit is refused by the headers of its files."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tokenizers import Tokenizer, models

from mettle.errors import UserError
from mettle.runs import fit
from mettle.runs.config import RunConfig
from mettle.trainer.config import DistillationConfig
from mettle.trainer.policy import write_tokenizer


@pytest.fixture
def config(tmp_path):
    """A run on a model of 1,000 bfloat16 numbers."""
    header = json.dumps({"__metadata__": {}, "w": {"dtype": "BF16", "shape": [10, 100], "data_offsets": [0, 2000]}})
    data = len(header).to_bytes(8, "little") + header.encode() + bytes(2000)
    (tmp_path / "model.safetensors").write_bytes(data)
    (tmp_path / "config.json").write_text("{}")

    def make(**changes):
        return RunConfig.model_validate(
            {"model": {"path": tmp_path, **changes}, "orchestrator": {"envs": [{"id": "reverse-text"}]}}
        )

    return make


@pytest.mark.parametrize(("lora", "least"), [(None, 4 * 4000 + 2 * 4000), ({"rank": 2}, len("x" * 2000) + 2 * 4000)])
def test_it_is_weighed_with_what_is_trained(config, monkeypatch, lora, least):
    monkeypatch.setattr(fit, "free_memory_bytes", lambda: least + 200)
    fit.check_fit(config(lora=lora))
    monkeypatch.setattr(fit, "free_memory_bytes", lambda: least - 1)
    with pytest.raises(UserError, match="does not fit: training takes at least"):
        fit.check_fit(config(lora=lora))


def test_a_teacher_that_the_trainer_holds_is_weighed_too(config, monkeypatch, tmp_path):
    made = config()
    teacher = made.model_copy(
        update={"trainer": made.trainer.model_copy(update={"distillation": DistillationConfig(teacher=tmp_path)})}
    )
    monkeypatch.setattr(fit, "free_memory_bytes", lambda: 7 * 4000)
    fit.check_fit(teacher)
    monkeypatch.setattr(fit, "free_memory_bytes", lambda: 7 * 4000 - 1)
    fit.check_fit(made)
    with pytest.raises(UserError, match=r"the teacher 0\.0 and the engine"):
        fit.check_fit(teacher)


def test_a_torn_file_is_named(config, tmp_path):
    made = config()
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match=r"model.safetensors cannot be read as safetensors"):
        fit.check_fit(made)


def test_a_run_whose_engine_computes_in_bfloat16_allows_for_it():
    def tolerances(**changes):
        config = RunConfig.model_validate({"orchestrator": {"envs": [{"id": "reverse-text"}]}, **changes})
        return config.orchestrator.canary_tolerance, config.trainer.mismatch.tolerance

    own = tolerances()
    assert tolerances(inference={"dtype": "float32"}) == own == (1e-3, 2e-3)
    assert tolerances(inference={"dtype": "bfloat16"}) == (0.02, 0.02)
    said = {"mismatch": {"tolerance": 0.3}}
    assert tolerances(inference={"dtype": "bfloat16"}, trainer=said) == (0.02, 0.3)


def test_a_teacher_has_the_policy_s_tokens_or_is_refused(tmp_path):
    wants = {"envs": [{"id": "reverse-text"}], "algorithm": "distillation"}

    def config(folder):
        return RunConfig.model_validate({"orchestrator": wants, "trainer": {"distillation": {"teacher": folder}}})

    with pytest.raises(UserError, match=r"holds no model: it has no config\.json"):
        fit.check_teacher(config(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    write_tokenizer(tmp_path, max_positions=64)
    fit.check_teacher(config(tmp_path))
    words = Tokenizer(models.WordLevel({"Seven": 0, "?": 1}, unk_token="?"))
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="has another tokenizer than the policy"):
        fit.check_teacher(config(tmp_path))
    with pytest.raises(ValueError, match="the trainer has no teacher"):
        config(None)
    with pytest.raises(ValueError, match="is held for nothing"):
        RunConfig.model_validate(
            {"orchestrator": {**wants, "algorithm": "grpo"}, "trainer": {"distillation": {"teacher": tmp_path}}}
        )


@pytest.fixture
def served():
    """A teacher's address: to it each id is a letter of the text, unless it is told that they are others."""
    said = {"text": fit.PROBE}

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            scored = {"tokens": list(said["text"]), "token_logprobs": [None] + [-1.0] * (len(asked["prompt"]) - 1)}
            body = json.dumps({"choices": [{"logprobs": scored}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1", said
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_teacher_that_is_asked_must_answer_and_have_the_policy_s_tokens(served, monkeypatch):
    url, said = served

    def check(**service):
        wants = {"envs": [{"id": "reverse-text"}], "algorithm": "reference_kl"}
        wants["services"] = {"reference": {"base_url": url, "model": "big", **service}}
        fit.check_services(RunConfig.model_validate({"orchestrator": wants}))

    check()
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(UserError, match=r"services\.reference\.api_key_var names NO_SUCH_KEY, which .* does not set"):
        check(api_key_var="NO_SUCH_KEY")
    monkeypatch.setenv("NO_SUCH_KEY", "k")
    check(api_key_var="NO_SUCH_KEY")
    said["text"] = "other words"
    with pytest.raises(UserError, match="has another tokenizer than the policy"):
        check()
    with pytest.raises(UserError, match=r"'reference' cannot be asked: .*; start it first, or mend orchestrator"):
        check(base_url="http://127.0.0.1:9/v1")


async def test_a_teacher_is_asked_where_a_loop_runs_already(served):
    wants = {"envs": [{"id": "reverse-text"}], "algorithm": "reference_kl"}
    wants["services"] = {"reference": {"base_url": served[0], "model": "big"}}
    fit.check_services(RunConfig.model_validate({"orchestrator": wants}))
