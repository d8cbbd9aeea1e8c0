"""The names that `SandboxConfig.backend` may have, and the object that each stands for.

A backend is registered under the entry point group `mettle.sandboxes`; Mettle's own stand there too, and in `BUILT_IN`,
so that a checkout that was never installed has them. Listing imports none of them.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Final

from mettle.errors import UserError

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


def load_backend(name: str) -> Any:
    """What the name stands for, imported now. Raises: UserError for an unknown name."""
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        return getattr(import_module(module), attribute)
    found = [point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name == name]
    if not found:
        raise UserError(f"there is no sandbox backend {name!r}; there are {', '.join(backend_names())}")
    return found[0].load()
