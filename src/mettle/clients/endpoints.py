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

Parts: `NamedEndpoint`, `Provider`, `Registry`, `read_registry`. Invariant: no key is ever in the file, only its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mettle.clients.factory import client_type_named
from mettle.clients.prices import Price, price_from
from mettle.errors import UserError

ENDPOINTS_FILE = Path("configs/endpoints.toml")
CHAT = "openai_chat_completions"
TABLES = ("endpoint", "providers", "prices")
ENDPOINT_KEYS = ("endpoint_id", "model", "url", "key", "type", "api_client_type", "headers", "price")
PROVIDER_KEYS = ("url", "key", "type", "api_client_type", "headers")


@dataclass(frozen=True, slots=True)
class Provider:
    """Where a company or a server answers, and the name of the variable that holds its key."""

    base_url: str
    api_key_var: str | None = None
    client_type: str = CHAT
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NamedEndpoint:
    """A model at a provider."""

    model: str
    provider: Provider
    price: Price | None = None


PROVIDERS: Mapping[str, Provider] = {
    "openai": Provider("https://api.openai.com/v1", "OPENAI_API_KEY"),
    "anthropic": Provider("https://api.anthropic.com", "ANTHROPIC_API_KEY", "anthropic_messages"),
    "openrouter": Provider("https://openrouter.ai/api/v1", "OPENROUTER_API_KEY"),
    "prime": Provider("https://api.pinference.ai/api/v1", "PRIME_API_KEY"),
    "deepseek": Provider("https://api.deepseek.com/v1", "DEEPSEEK_API_KEY"),
    "minimax": Provider("https://api.minimax.chat/v1", "MINIMAX_API_KEY"),
    "glm": Provider("https://open.bigmodel.cn/api/paas/v4", "GLM_API_KEY"),
    "local": Provider("http://127.0.0.1:8000/v1"),
    "vllm": Provider("http://127.0.0.1:8000/v1", "VLLM_API_KEY"),
    "ollama": Provider("http://127.0.0.1:11434/v1"),
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
            raise UserError(f"no provider {name!r}; {_hint(name, list(self.providers))}")
        return self.providers[name]

    def price(self, model: str, *others: str) -> Price | None:
        """The price of a model, by its name or by another name for it; None when nobody wrote it down."""
        return next((self.prices[name] for name in (model, *others) if name in self.prices), None)


def read_registry(path: Path = ENDPOINTS_FILE, *, is_needed: bool = False) -> Registry:
    """The registry of a file; without the file, only the built-in providers.

    Raises: UserError, one line with file and line, for a file that is not as above.
    """
    from mettle.config.layers import read_layer

    if not path.exists() and not is_needed:
        return Registry(path)
    layer = read_layer(path)

    def at(*place: str | int) -> str:
        return layer.source_of(place) or str(path)

    _check_keys(layer.tree, TABLES, at, ())
    registry = Registry(path)
    for name, table in _tables(layer.tree, "providers", at):
        registry.providers[name] = _provider(table, PROVIDER_KEYS, at, ("providers", name))
    for name, table in _tables(layer.tree, "prices", at):
        registry.prices[name] = price_from(table, at("prices", name))
    rows = layer.tree.get("endpoint", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{at('endpoint')}: endpoints are [[endpoint]] tables")
    for number, row in enumerate(rows):
        place = ("endpoint", number)
        provider = _provider(row, ENDPOINT_KEYS, at, place)
        missing = [key for key in ("endpoint_id", "model") if key not in row]
        if missing:
            raise UserError(f"{at(*place)}: endpoint.{number} lacks {missing[0]}")
        price = price_from(row["price"], at(*place, "price")) if "price" in row else None
        registry.endpoints.setdefault(str(row["endpoint_id"]), []).append(
            NamedEndpoint(str(row["model"]), provider, price)
        )
    return registry


def _tables(tree: Mapping[str, Any], name: str, at: Any) -> Sequence[tuple[str, Any]]:
    value = tree.get(name, {})
    if not isinstance(value, dict):
        raise UserError(f"{at(name)}: {name} are tables, as [{name}.NAME]")
    return list(value.items())


def _provider(table: Any, known: Sequence[str], at: Any, place: tuple[str | int, ...]) -> Provider:
    named = ".".join(map(str, place))
    if not isinstance(table, dict):
        raise UserError(f"{at(*place)}: {named} is a table with url and key")
    _check_keys(table, known, at, place)
    if not isinstance(table.get("url"), str):
        raise UserError(f"{at(*place)}: {named} lacks url")
    headers = table.get("headers", {})
    if not isinstance(headers, dict) or not all(isinstance(value, str) for value in headers.values()):
        raise UserError(f"{at(*place, 'headers')}: {named}.headers are names and texts")
    kind = table.get("type", table.get("api_client_type", CHAT))
    try:
        client_type = client_type_named(str(kind))
    except UserError as error:
        raise UserError(f"{at(*place, 'type')}: {named}: {error}") from None
    key = table.get("key")
    return Provider(table["url"], str(key) if key else None, client_type, dict(headers))


def _check_keys(table: Mapping[str, Any], known: Sequence[str], at: Any, place: tuple[str | int, ...]) -> None:
    for key in table:
        if key not in known:
            named = ".".join(map(str, (*place, key)))
            raise UserError(f"{at(*place, key)}: unknown key {named!r}; {_hint(key, known)}")


def _hint(word: str, known: Sequence[str]) -> str:
    import difflib

    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
