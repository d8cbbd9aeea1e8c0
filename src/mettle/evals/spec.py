"""What is to be evaluated: the settings of one evaluation, and the names under which they may be written.

Parts: `EvalSpec`, `SETTINGS` (each setting's kind), `ALIASES`, `IGNORED`, `checked` (a written value as a setting),
`spec_from` (levels of settings, weakest first, as one spec). Invariant: tables (arguments, sampling, headers) merge key
by key from level to level, everything else is replaced; `max_tokens` and `temperature` are sampling arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from mettle.config.values import flag, text, whole
from mettle.errors import UserError

DEFAULT_NUM_EXAMPLES = 5
DEFAULT_ROLLOUTS = 3
MERGED = ("env_args", "extra_env_kwargs", "sampling_args", "headers", "headers_from_state")
NOT_SAVED = ("headers", "resume", "resume_path")
"""Settings that are not written beside the results: headers can hold secrets."""


@dataclass(frozen=True, slots=True)
class EvalSpec:
    """One evaluation. `model` is a model's name, an endpoint's id or a model directory; -1 examples are all."""

    env_id: str
    model: str
    name: str | None = None
    env_args: dict[str, Any] = field(default_factory=dict)
    extra_env_kwargs: dict[str, Any] = field(default_factory=dict)
    env_dir_path: str | None = None
    endpoints_path: str | None = None
    provider: str | None = None
    api_base_url: str | None = None
    api_key_var: str | None = None
    api_client_type: str | None = None
    tokenizer: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    headers_from_state: dict[str, str] = field(default_factory=dict)
    sampling_args: dict[str, Any] = field(default_factory=dict)
    num_examples: int = DEFAULT_NUM_EXAMPLES
    rollouts_per_example: int = DEFAULT_ROLLOUTS
    shuffle: bool = False
    shuffle_seed: int | None = None
    max_concurrent: int = 32
    num_workers: int | str = 0
    independent_scoring: bool = False
    max_retries: int = 3
    timeout: float | None = None
    state_columns: list[str] = field(default_factory=list)
    output_dir: str | None = None
    save_results: bool = True
    resume: bool = False
    resume_path: str | None = None

    @property
    def num_processes(self) -> int:
        """Worker processes; 0 runs in this one."""
        if isinstance(self.num_workers, int):
            return self.num_workers
        needed = -(-self.max_concurrent // ROLLOUTS_PER_WORKER)
        return needed if needed > 1 else 0

    @property
    def title(self) -> str:
        """What to call it where several are shown."""
        return self.name or self.env_id

    def to_dict(self) -> dict[str, Any]:
        """As it is saved, so that a later command can go on without being told again."""
        return {name: value for name, value in asdict(self).items() if name not in NOT_SAVED}


def _num_examples(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < -1 or value == 0:
        raise ValueError("a whole number of at least 1, or -1 for all")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
        raise ValueError("a number of at least 0")
    return float(value)


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("a table")
    return dict(value)


def _workers(value: Any) -> int | str:
    if value == "auto":
        return "auto"
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    try:
        return whole(0)(value)
    except ValueError:
        raise ValueError("a whole number, 0 for this process, or 'auto'") from None


def _names(value: Any) -> list[str]:
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise ValueError("a list of names")
    return list(value)


def _headers(value: Any) -> dict[str, str]:
    """A table, or "Name: value" lines."""
    if isinstance(value, dict) and all(isinstance(text, str) for text in value.values()):
        return dict(value)
    lines = [value] if isinstance(value, str) else value
    if not isinstance(lines, list | tuple) or not all(isinstance(line, str) and ":" in line for line in lines):
        raise ValueError("'Name: value' lines, or a table of them")
    return {name.strip(): text.strip() for name, _, text in (line.partition(":") for line in lines)}


SETTINGS: dict[str, Callable[[Any], Any]] = {
    "env_id": text, "model": text, "name": text, "env_args": _table, "extra_env_kwargs": _table,
    "env_dir_path": text, "endpoints_path": text, "provider": text, "api_base_url": text, "api_key_var": text,
    "api_client_type": text, "tokenizer": text, "headers": _headers,
    "headers_from_state": _headers, "sampling_args": _table,
    "max_tokens": whole(1), "temperature": _number, "num_examples": _num_examples, "rollouts_per_example": whole(1),
    "shuffle": flag, "shuffle_seed": whole(0), "max_concurrent": whole(1), "num_workers": _workers,
    "independent_scoring": flag, "max_retries": whole(0), "timeout": _number,
    "state_columns": _names, "output_dir": text, "save_results": flag,
    "resume": flag, "resume_path": text,
}  # fmt: skip

ROLLOUTS_PER_WORKER = 256
"""With `num_workers = "auto"`, a process for so many rollouts at a time; none of their own when one will do."""

ALIASES = {
    "id": "env_id", "args": "env_args", "sampling": "sampling_args", "endpoint_id": "model", "header": "headers",
    "header_from_state": "headers_from_state",
}  # fmt: skip

IGNORED = (
    "verbose", "disable_tui", "fullscreen", "disable_env_server", "abbreviated_summary", "eval_name",
    "timeout_minutes", "allow_sandbox_access", "allow_instances_access", "allow_tunnel_access", "heartbeat_url",
)  # fmt: skip
"""Settings of other programs that change nothing about the results here; they are accepted and have no effect."""


def checked(key: str, value: Any) -> tuple[str, Any]:
    """A setting by its own name, with its value.

    Raises: UserError when it is no such value, KeyError when it is no setting.
    """
    name = ALIASES.get(key, key)
    try:
        return name, SETTINGS[name](value)
    except ValueError as error:
        shown = value[0] if isinstance(value, tuple) and len(value) == 1 else value  # an option given once
        raise UserError(f"{key} = {shown!r}: must be {error}") from None


def spec_from(levels: Sequence[Mapping[str, Any]]) -> EvalSpec:
    """One spec from levels of settings by their own names, the strongest last."""
    merged: dict[str, Any] = {}
    for level in levels:
        for name, value in folded(level).items():
            merged[name] = {**merged.get(name, {}), **value} if name in MERGED else value
    if merged.get("shuffle") and merged.get("shuffle_seed") is None:
        merged["shuffle_seed"] = 0  # Without a seed, resuming would draw other tasks.
    known = {entry.name for entry in fields(EvalSpec)}
    return EvalSpec(**{name: value for name, value in merged.items() if name in known})


def folded(level: Mapping[str, Any]) -> dict[str, Any]:
    """A level whose `max_tokens` and `temperature` are sampling arguments, under those that it gives by that name."""
    kept = {name: value for name, value in level.items() if name not in ("max_tokens", "temperature")}
    short = {name: level[name] for name in ("max_tokens", "temperature") if level.get(name) is not None}
    if short:
        kept["sampling_args"] = {**short, **kept.get("sampling_args", {})}
    return kept


def relative_to(path: str, folder: Path) -> str:
    """A path from a file: beside that file when it is there, else from the working directory."""
    beside = folder / path
    return str(beside) if beside.exists() else path
