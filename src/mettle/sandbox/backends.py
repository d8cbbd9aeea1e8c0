"""Where sandboxes run: `open_machines` and `open_judge` give what a config asks for, not yet started."""

from __future__ import annotations

from mettle.sandbox.config import SandboxConfig
from mettle.sandbox.plugins import backend_names, load_backend
from mettle.sandbox.protocols import Backend, Judge, Machines

__all__ = ["backend_names", "find_backend", "open_judge", "open_machines"]


def find_backend(name: str) -> Backend:
    """The backend of that name, imported now. Raises: UserError for an unknown name."""
    backend: Backend = load_backend(name)
    return backend


def open_machines(config: SandboxConfig) -> Machines:
    """The machine pool that the config asks for: `async with open_machines(config) as machines`."""
    return find_backend(config.backend).machines(config)


def open_judge(config: SandboxConfig) -> Judge:
    """The judge that the config asks for: `async with open_judge(config) as judge`."""
    return find_backend(config.backend).judge(config)
