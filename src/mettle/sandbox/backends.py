"""Where sandboxes run, by the name in `SandboxConfig.backend`.

Parts: `backend_names`, `find_backend`; `open_machines` and `open_judge`, which give what a config asks for, not yet
started (`async with` starts it). A backend is registered under the entry point group `mettle.sandboxes`; Mettle's own
stand there too (and in `BUILT_IN`, so that a checkout that was never installed has them). Listing imports none of them.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final

from mettle.errors import UserError

if TYPE_CHECKING:
    from mettle.sandbox.config import SandboxConfig
    from mettle.sandbox.protocols import Backend, Judge, Machines

ENTRY_POINT_GROUP: Final = "mettle.sandboxes"
BUILT_IN: Final = {
    "zygote": "mettle.sandbox.embedded:EMBEDDED",
    "unsafe": "mettle.sandbox.embedded:EMBEDDED",
    "docker": "mettle.sandbox.containers.docker:DOCKER",
    "kubernetes": "mettle.sandbox.containers.kubernetes:KUBERNETES",
    "remote": "mettle.sandbox.service.client:REMOTE",
}
"""Name to `module:object`, as in an entry point."""


def backend_names() -> list[str]:
    """The names that a config may have."""
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def find_backend(name: str) -> Backend:
    """The backend of that name, imported now. Raises: UserError for an unknown name."""
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        built_in: Backend = getattr(import_module(module), attribute)
        return built_in
    found = [point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name == name]
    if not found:
        raise UserError(f"there is no sandbox backend {name!r}; there are {', '.join(backend_names())}")
    backend: Backend = found[0].load()
    return backend


def open_machines(config: SandboxConfig) -> Machines:
    """The machine pool that the config asks for: `async with open_machines(config) as machines`."""
    return find_backend(config.backend).machines(config)


def open_judge(config: SandboxConfig) -> Judge:
    """The judge that the config asks for: `async with open_judge(config) as judge`."""
    return find_backend(config.backend).judge(config)
