"""Named endpoints, providers and prices: what `configs/endpoints.toml` says.

[[endpoint]]
endpoint_id = "mine"                    # -m mine; several tables of one id take turns
model = "policy"
url = "http://127.0.0.1:8000/v1"
key = "MY_KEY"                          # optional: name of the environment variable that holds the key
type = "openai_chat_completions"        # optional: see `mettle.clients.factory`
headers = {}                            # optional
price = {input_usd_per_mtok = 0.4, output_usd_per_mtok = 1.6}   # optional

[providers.lab]                         # -p lab
url = "https://llm.example.org/v1"
key = "LAB_KEY"

[prices."gpt-5-mini"]                   # by model, wherever it is served
input_usd_per_mtok = 0.25
output_usd_per_mtok = 2.0

Parts: `Provider`, `NamedEndpoint`, `EndpointsFile` (the file), `Registry` (the file on top of what is built in),
`read_registry`. Invariant: no key is ever in the file, only its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field

from mettle.clients.factory import client_type_named
from mettle.clients.prices import Price, price_from
from mettle.config import load_config, nearest
from mettle.errors import UserError

ENDPOINTS_FILE = Path("configs/endpoints.toml")


def _client_type(name: str) -> str:
    try:
        return client_type_named(name)
    except UserError as error:
        raise ValueError(str(error)) from None


PriceTable = Annotated[Price, BeforeValidator(price_from)]


class Provider(BaseModel):
    """Where a company or a server answers, and the name of the variable that holds its key."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    url: str
    """Base URL, as http://127.0.0.1:8000/v1."""
    key: str | None = None
    """Environment variable that holds the key; none is sent without it."""
    type: Annotated[str, AfterValidator(_client_type)] = Field(
        default="openai_chat_completions", validation_alias=AliasChoices("type", "api_client_type")
    )
    """Kind of client: chat, completions, responses, anthropic or tokens, or the long name of one. Also
    `api_client_type`."""
    headers: dict[str, str] = {}
    """Headers of each request."""


class NamedEndpoint(Provider):
    """A model at a provider, under a name of its own."""

    endpoint_id: str
    """What `-m` calls it; several tables of one name take turns, rollout by rollout."""
    model: str
    """The name of the model in requests."""
    price: PriceTable | None = None
    """US dollars for a million tokens read and written: `{input_usd_per_mtok = 0.4, output_usd_per_mtok = 1.6}`."""


class EndpointsFile(BaseModel):
    """What `configs/endpoints.toml` may say."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    IS_FILE_ONLY: ClassVar[bool] = True

    endpoint: list[NamedEndpoint] = []
    """Endpoints by name, as `[[endpoint]]` tables."""
    providers: dict[str, Provider] = {}
    """More providers for `-p`, as `[providers.NAME]`; a built-in name is replaced."""
    prices: dict[str, PriceTable] = {}
    """Prices by model, wherever it is served, as `[prices."MODEL"]`."""


PROVIDERS: Mapping[str, Provider] = {
    "openai": Provider(url="https://api.openai.com/v1", key="OPENAI_API_KEY"),
    "anthropic": Provider(url="https://api.anthropic.com", key="ANTHROPIC_API_KEY", type="anthropic_messages"),
    "openrouter": Provider(url="https://openrouter.ai/api/v1", key="OPENROUTER_API_KEY"),
    "prime": Provider(url="https://api.pinference.ai/api/v1", key="PRIME_API_KEY"),
    "deepseek": Provider(url="https://api.deepseek.com/v1", key="DEEPSEEK_API_KEY"),
    "minimax": Provider(url="https://api.minimax.chat/v1", key="MINIMAX_API_KEY"),
    "glm": Provider(url="https://open.bigmodel.cn/api/paas/v4", key="GLM_API_KEY"),
    "local": Provider(url="http://127.0.0.1:8000/v1"),
    "vllm": Provider(url="http://127.0.0.1:8000/v1", key="VLLM_API_KEY"),
    "ollama": Provider(url="http://127.0.0.1:11434/v1"),
}


@dataclass(frozen=True, slots=True)
class Registry:
    """What a file says, on top of the providers that are built in."""

    path: Path
    endpoints: dict[str, list[NamedEndpoint]] = field(default_factory=dict)
    providers: dict[str, Provider] = field(default_factory=lambda: dict(PROVIDERS))
    prices: dict[str, Price] = field(default_factory=dict)

    def provider(self, name: str) -> Provider:
        """The provider of that name. Raises: UserError naming the nearest one."""
        if name not in self.providers:
            close = nearest(name, list(self.providers))
            hint = f"did you mean {close!r}?" if close else f"there are {', '.join(self.providers)}"
            raise UserError(f"no provider {name!r}; {hint}")
        return self.providers[name]

    def price(self, model: str, *others: str) -> Price | None:
        """The price of a model, by its name or by another name for it; None when nobody wrote it down."""
        return next((self.prices[name] for name in (model, *others) if name in self.prices), None)


def read_registry(path: Path = ENDPOINTS_FILE, *, is_needed: bool = False) -> Registry:
    """The registry of a file; without the file, only the built-in providers.

    Raises: UserError, one line with file and line, for a file that is not as above.
    """
    if not path.exists() and not is_needed:
        return Registry(path)
    file = load_config(EndpointsFile, [path]).config
    registry = Registry(path, providers={**PROVIDERS, **file.providers}, prices=dict(file.prices))
    for endpoint in file.endpoint:
        registry.endpoints.setdefault(endpoint.endpoint_id, []).append(endpoint)
    return registry
