"""Which Hub one talks to, and as whom: saved addresses with their tokens, in a file that its user alone can read.

Parts: `HubContext`, `Contexts`. The environment goes before the file: METTLE_API_KEY and METTLE_HUB_URL. Invariant: a
token is sent to the address that it was saved for, and to no other.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from mettle.errors import UserError

DEFAULT_URL: Final = "http://127.0.0.1:7860"


@dataclass(frozen=True, slots=True)
class HubContext:
    """A Hub and who one is there. `team` is the slug of the team that acts; empty is oneself."""

    url: str = DEFAULT_URL
    token: str = field(default="", repr=False)
    user: str = ""
    team: str = ""


@dataclass(slots=True)
class Contexts:
    """The contexts that are saved, and the one in use."""

    path: Path
    current: str = "default"
    saved: dict[str, HubContext] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path | None = None) -> Contexts:
        """Those of this user. Raises: UserError when the file cannot be read."""
        path = path or _default_path()
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            known = {name: HubContext(**entry) for name, entry in value["contexts"].items()}
            return cls(path, str(value["current"]), known)
        except FileNotFoundError:
            return cls(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} cannot be read ({error}); mend it, or remove it and `mettle login`") from error

    def save(self) -> None:
        """Write the file, readable by its user alone. Raises: OSError when the disk refuses."""
        value = {"current": self.current, "contexts": {name: asdict(entry) for name, entry in self.saved.items()}}
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        aside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(value, file, indent=2)
                file.write("\n")
            os.replace(aside, self.path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise

    @property
    def active(self) -> HubContext:
        """The one in use, with what the environment says instead."""
        here = self.saved.get(self.current, HubContext())
        url, key = os.environ.get("METTLE_HUB_URL", ""), os.environ.get("METTLE_API_KEY", "")
        if url and checked_url(url) != here.url:
            here = HubContext(checked_url(url))  # a saved token is not for another address
        return replace(here, token=key) if key else here


def checked_url(url: str) -> str:
    """An address without what clients of the field leave at its end. Raises: UserError when it is none."""
    text = url.strip()
    parts = urlsplit(text if "://" in text else f"http://{text}")
    try:
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_good = False
    if not is_good or parts.username or parts.query or parts.fragment:
        raise UserError(f"{url!r} is no address of a Hub; write it like https://hub.example.org or {DEFAULT_URL}")
    path = parts.path.rstrip("/").removesuffix("/api/v1").rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}"


def _default_path() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "mettle" / "hub.json"
