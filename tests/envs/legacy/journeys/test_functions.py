"""The functions of `verifiers.utils` that environments call themselves."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

import mettle.envs as vf
from mettle.envs.errors import SandboxError, error_data, error_from_data, is_error_data
from mettle.envs.legacy import asynchrony, clients, logs, messages, results
from mettle.envs.legacy.responses import as_response

NESTED = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_messages_are_made_joined_and_saved():
    made = messages.from_raw_message({"role": "assistant", "content": None, "tool_calls": [NESTED]})
    assert made.tool_calls[0].name == "add"
    joined = messages.concat_messages([[{"role": "user", "content": "q"}], "text", [made]])
    assert [message["role"] for message in joined] == ["user", "text", "assistant"]
    saved = messages.sanitize_tool_calls(joined)
    assert json.loads(saved[2]["tool_calls"][0])["name"] == "add"
    assert messages.get_messages(joined, role="user") == [{"role": "user", "content": "q"}]
    with pytest.raises(TypeError, match="prompt"):
        messages.normalize_messages([3], field_name="prompt")


def test_images_are_named_and_not_shown():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    shown = messages.messages_to_printable([{"role": "user", "content": [{"type": "text", "text": "see"}, image]}])
    assert shown[0]["content"] == "see [image]"
    assert "see [image]" in messages.format_messages(shown).plain


def test_empty_fields_of_content_parts_are_left_out():
    part = {"type": "text", "text": "a", "image_url": None}
    cleaned = messages.strip_nones_from_content([{"role": "user", "content": [part]}])
    assert cleaned[0]["content"] == [{"type": "text", "text": "a"}]


def test_content_parts_know_their_type():
    part = vf.ImageUrlContentPart(image_url=vf.ImageUrlSource(url="data:x"))
    assert part == {"type": "image_url", "image_url": {"url": "data:x"}}
    assert part.image_url.url == "data:x"
    assert messages.from_raw_content_part({"type": "text", "text": "a"}).text == "a"


async def test_an_sdks_answer_is_read_as_a_response():
    raw = {
        "id": "r",
        "created": 1,
        "model": "m",
        "choices": [{"message": {"role": "assistant", "content": "hi"}, "finish_reason": "length"}],
    }
    answer = type("ChatCompletion", (), {"model_dump": lambda self: raw})()
    said = await vf.parse_response_messages(answer, "chat")
    assert said == [{"role": "assistant", "content": "hi"}]
    assert as_response(answer).message.is_truncated
    assert await vf.parse_response_tokens(answer, 10) is None
    with pytest.raises(vf.InvalidModelResponseError):
        as_response(3)


async def test_retries_go_on_while_a_state_holds_an_error_that_may_pass(monkeypatch):
    waited = []

    async def sleep(seconds):
        waited.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    errors = iter([SandboxError("gone"), SandboxError("gone"), None])

    async def attempt():
        return {"error": next(errors)}

    assert (await asynchrony.maybe_retry(attempt, max_retries=3)())["error"] is None
    assert len(waited) == 2
    assert asynchrony.maybe_retry(attempt) is attempt


async def test_limits_and_named_arguments():
    async with await asynchrony.maybe_semaphore(2), await asynchrony.maybe_semaphore(None):
        pass

    async def both(a, b):
        return a + b

    assert await asynchrony.maybe_call_with_named_args(both, a=1, b=2, c=3) == 3
    assert await asynchrony.with_sem(asynchrony.NullAsyncContext(), both(1, 1)) == 2
    assert asynchrony.get_or_create_thread_attr("k", list) is asynchrony.get_or_create_thread_attr("k", dict)


def test_a_failure_survives_being_saved():
    data = error_data(vf.ToolCallError("no"))
    assert is_error_data(data)
    again = error_from_data(data)
    assert type(again) is vf.ToolCallError
    assert str(again) == "no"
    assert type(error_from_data({"error": "Unknown", "error_chain_str": "Unknown -> SandboxError"})) is SandboxError


def test_an_error_chain_has_both_of_its_names():
    error = vf.ModelError("outer")
    error.__cause__ = ValueError("inner")
    chain = vf.ErrorChain(error)
    assert chain.chain == chain.errors
    assert chain.root_error is error
    assert str(chain) == "ModelError -> ValueError"
    assert ValueError in chain
    assert vf.get_error_chain(error, vf.Error) == [error]


def test_clients_are_made_of_a_config(monkeypatch, tmp_path):
    pytest.importorskip("openai")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".prime").mkdir()
    (tmp_path / ".prime" / "config.json").write_text('{"api_key": "k", "team_id": "t"}', encoding="utf-8")
    monkeypatch.delenv("PRIME_API_KEY", raising=False)
    assert vf.load_prime_config()["team_id"] == "t"
    config = vf.ClientConfig(api_base_url="http://127.0.0.1:1/v1", api_key_var="PRIME_API_KEY")
    client = vf.setup_openai_client(config)
    assert client.api_key == "k"
    assert str(client.base_url) == "http://127.0.0.1:1/v1/"
    assert client.default_headers["X-Prime-Team-ID"] == "t"
    assert clients.resolve_client_configs(config) == [config]


def test_logging_goes_where_it_is_sent(tmp_path):
    before = {
        name: (logging.getLogger(name).handlers[:], logging.getLogger(name).propagate) for name in logs.LOGGER_NAMES
    }
    file = tmp_path / "log"
    try:
        vf.setup_logging("INFO", console_logging=False, file_logging=True, log_file=str(file), json_logging=True)
        logging.getLogger("verifiers.mine").info("said")
        with vf.quiet_verifiers():
            logging.getLogger("verifiers.mine").info("unsaid")
        entry = json.loads(file.read_text(encoding="utf-8"))
    finally:
        for name, (handlers, propagate) in before.items():
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(logging.NOTSET)
    assert (entry["message"], entry["name"]) == ("said", "verifiers.mine")
    with pytest.raises(ValueError, match="log_file"):
        vf.setup_logging(file_logging=True)


def test_a_sample_is_printed(capsys):
    vf.print_prompt_completions_sample(
        [[{"role": "user", "content": "asked"}]],
        [[{"role": "assistant", "content": "told"}]],
        [vf.ModelError("down")],
        [0.5],
        step=3,
    )
    printed = capsys.readouterr().out
    assert "asked" in printed
    assert "told" in printed
    assert "0.50" in printed
    assert "ModelError" in printed
    assert "Step 3" in printed


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.056, "56ms"), (5, "5s"), (184, "3m 4s"), (7200, "2h"), (93600, "1d 2h")]
)
def test_durations_are_short(seconds, text):
    assert logs.print_time(seconds) == text


def test_outputs_are_saved_and_read(tmp_path):
    results.save_outputs([{"example_id": 0, "reward": 1.0}], tmp_path)
    results.save_outputs([{"example_id": 1, "odd": {1, 2}}], tmp_path, mode="a")
    with (tmp_path / "results.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"example_id": 2, "cut')
    assert [row["example_id"] for row in results.load_outputs(tmp_path)] == [0, 1]
    assert results.compute_pass_at_k([1.0, 0.0], 1) == 0.5
    assert not results.is_json_serializable({1})


def test_marks_that_only_mark_are_found_in_their_order():
    class Marked:
        @vf.reward(weight=0.5, priority=1)
        def first(self): ...

        @vf.reward
        def second(self): ...

        @vf.metric(stage="group")
        def third(self): ...

    owner = Marked()
    assert [method.__name__ for method in vf.discover_decorated(owner, "reward")] == ["first", "second"]
    assert owner.first.reward_weight == 0.5
    assert owner.third.metric_stage == "group"


def test_records_take_what_they_are_given():
    config = vf.EvalConfig(env_id="e", num_examples=3)
    assert (config.env_id, config["num_examples"], config.max_concurrent) == ("e", 3, None)
    assert vf.EndpointConfig(model="m", base_url="u", api_key_var="K").extra_headers is None
    assert vf.RolloutScore(reward=1.0, metrics={}).model_dump() == {"reward": 1.0, "metrics": {}}
