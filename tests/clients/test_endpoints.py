"""Named endpoints, providers and prices; the kinds of client by name; endpoints that take turns."""

from __future__ import annotations

from collections import Counter

import pytest

from mettle.clients.base import Client
from mettle.clients.config import ClientConfig
from mettle.clients.endpoint_clients import (
    AnthropicMessagesClient,
    OpenAIChatCompletionsClient,
    OpenAICompletionsClient,
    OpenAIResponsesClient,
)
from mettle.clients.endpoints import read_registry
from mettle.clients.factory import client_from
from mettle.clients.prices import Price
from mettle.clients.rotation import RotatingClient
from mettle.errors import UserError

FULL = """
[[endpoint]]
endpoint_id = "mine"
model = "policy"
url = "http://127.0.0.1:8000/v1"
key = "MY_KEY"
type = "completions"
headers = {"X-Lab" = "1"}
price = {input_usd_per_mtok = 0.5, output_usd_per_mtok = 2}

[[endpoint]]
endpoint_id = "mine"
model = "policy-b"
url = "http://127.0.0.1:8001/v1"

[providers.lab]
url = "https://llm.example.org/v1"
key = "LAB_KEY"

[prices."big-model"]
input_usd_per_mtok = 1.0
output_usd_per_mtok = 4.0
"""


@pytest.fixture
def read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write_and_read(text):
        (tmp_path / "endpoints.toml").write_text(text)
        return read_registry(tmp_path / "endpoints.toml")

    return write_and_read


def test_a_file_names_endpoints_providers_and_prices(read):
    registry = read(FULL)
    first, second = registry.endpoints["mine"]
    assert (first.model, first.key, first.type) == (
        "policy",
        "MY_KEY",
        "openai_completions",
    )
    assert (first.headers, first.price) == ({"X-Lab": "1"}, Price(0.5, 2.0))
    assert (second.model, second.url, second.price) == ("policy-b", "http://127.0.0.1:8001/v1", None)
    assert registry.provider("lab").url == "https://llm.example.org/v1"
    assert registry.provider("openai").key == "OPENAI_API_KEY", "built in"
    assert registry.price("big-model") == Price(1.0, 4.0)
    assert registry.price("unheard-of") is None, "an unknown price is never 0"


def test_without_a_file_there_are_the_built_in_providers(tmp_path):
    registry = read_registry(tmp_path / "none.toml")
    assert registry.endpoints == {}
    assert registry.provider("ollama").url == "http://127.0.0.1:11434/v1"
    with pytest.raises(UserError, match=r"no config file .*none\.toml"):
        read_registry(tmp_path / "none.toml", is_needed=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[endpoint]]\nendpoint_id = "a"\nmodel = "m"\nurl = "u"\nkye = "K"', "endpoints.toml:5: unknown key 'endpoint.0.kye'; did you mean 'key'?"),
        ('[[endpoint]]\nendpoint_id = "a"\nurl = "u"', "endpoints.toml:1: endpoint.0.model is missing"),
        ('[[endpoint]]\nendpoint_id = "a"\nmodel = "m"', "endpoints.toml:1: endpoint.0.url is missing"),
        ('[[endpoint]]\nendpoint_id = "a"\nmodel = "m"\nurl = "u"\ntype = "chatt"', """endpoints.toml:5: endpoint.0.type = "chatt": unknown client type 'chatt'; did you mean 'chat'?"""),
        ('[endpoint]\nmodel = "m"', "endpoints.toml:1: endpoint is a list of tables; write [[endpoint]]"),
        ('[[endpoints]]\nmodel = "m"', "unknown key 'endpoints'; did you mean 'endpoint'?"),
        ('[prices.m]\ninput_usd_per_mtok = -1\noutput_usd_per_mtok = 1', "endpoints.toml:2: prices.m: {'input_usd_per_mtok': -1, 'output_usd_per_mtok': 1} is no price"),
        ('[prices.m]\ninput = 1', "is no price; a price is {input_usd_per_mtok = 0.4"),
        ('[providers.x]\nkey = "K"', "providers.x.url is missing"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_file_is_one_line(read, text, message):
    with pytest.raises(UserError) as raised:
        read(text)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_cost_is_dollars_for_a_million_tokens():
    assert Price(0.5, 2.0).cost(1_000_000, 500_000) == {"input_usd": 0.5, "output_usd": 1.0, "total_usd": 1.5}


def test_kinds_of_client_have_short_names():
    url = "http://127.0.0.1:9/v1"
    assert type(client_from(ClientConfig(url, client_type="chat"))) is OpenAIChatCompletionsClient
    assert type(client_from(ClientConfig(url, client_type="completions"))) is OpenAICompletionsClient
    assert type(client_from(ClientConfig(url, client_type="responses"))) is OpenAIResponsesClient
    assert type(client_from(ClientConfig(url, client_type="anthropic"))) is AnthropicMessagesClient
    with pytest.raises(UserError, match="did you mean 'anthropic'"):
        client_from(ClientConfig(url, client_type="antropic"))
    with pytest.raises(UserError, match="it needs a tokenizer"):
        client_from(ClientConfig(url, client_type="tokens"))


async def test_endpoints_of_one_name_take_turns_and_a_rollout_stays_with_its_own():
    class Named(Client):
        def __init__(self, name):
            self.name, self.base_url, self.closed = name, f"http://{name}/v1", False

        async def get_response(self, prompt, model, sampling_args=None, tools=None, **kwargs):
            return (self.name, model)

        async def close(self):
            self.closed = True

    a, b = Named("a"), Named("b")
    client = RotatingClient([(a, None), (b, "policy-b")])
    states = [{} for _ in range(10)]
    first = [await client.get_response([], "m", state=state) for state in states]
    assert Counter(first) == {("a", "m"): 5, ("b", "policy-b"): 5}
    assert [await client.get_response([], "m", state=state) for state in states] == first
    assert {await client.get_response([], "m") for _ in range(2)} == {("a", "m"), ("b", "policy-b")}
    await client.close()
    assert a.closed
    assert b.closed
    assert client.base_url == "http://a/v1"


def test_a_config_with_variants_makes_a_client_that_rotates():
    variants = [ClientConfig(f"http://127.0.0.1:{port}/v1", model=f"m{port}") for port in (1, 2)]
    made = client_from(ClientConfig(endpoint_configs=variants))
    assert isinstance(made, RotatingClient)
    assert [model for _, model in made.clients] == ["m1", "m2"]
