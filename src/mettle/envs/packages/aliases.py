"""`import verifiers` inside this process.

Parts: `install_verifiers_alias`. Environments written for verifiers import it under its own name and by historical
submodule paths; `load_environment` makes those names resolve here before it imports one. Invariants: it happens in this
process only and on request; a verifiers that was imported before is not replaced, because two libraries would then
share one name.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from mettle.errors import UserError

_ALIASES: dict[str, str] = {
    "verifiers.types": "mettle.envs.types",
    "verifiers.errors": "mettle.envs.errors",
    "verifiers.decorators": "mettle.envs.decorators",
    "verifiers.clients.client": "mettle.clients.base",
    "verifiers.clients.openai_chat_completions_client": "mettle.clients.chat",
    "verifiers.clients.openai_completions_client": "mettle.clients.completions",
    "verifiers.clients.openai_responses_client": "mettle.clients.responses",
    "verifiers.clients.anthropic_messages_client": "mettle.clients.anthropic_messages",
    "verifiers.envs.environment": "mettle.envs.environment",
    "verifiers.envs.multiturn_env": "mettle.envs.multiturn_env",
    "verifiers.envs.singleturn_env": "mettle.envs.singleturn_env",
    "verifiers.envs.tool_env": "mettle.envs.tool_env",
    "verifiers.envs.stateful_tool_env": "mettle.envs.stateful_tool_env",
    "verifiers.envs.env_group": "mettle.envs.env_group",
    "verifiers.envs.sandbox_env": "mettle.envs.sandbox_env",
    "verifiers.envs.python_env": "mettle.envs.python_env",
    "verifiers.envs.experimental.cli_agent_env": "mettle.envs.cli_agent_env",
    "verifiers.envs.experimental.harbor_env": "mettle.envs.harbor_env",
    "verifiers.envs.experimental.sandbox_mixin": "mettle.envs.sandbox_mixin",
    "verifiers.utils.threaded_sandbox_client": "mettle.envs.packages.prime_sandboxes.client",
    "verifiers.parsers.parser": "mettle.envs.parsers.parser",
    "verifiers.parsers.xml_parser": "mettle.envs.parsers.xml_parser",
    "verifiers.parsers.think_parser": "mettle.envs.parsers.think_parser",
    "verifiers.parsers.maybe_think_parser": "mettle.envs.parsers.think_parser",
    "verifiers.rubrics.rubric": "mettle.envs.rubrics.rubric",
    "verifiers.rubrics.rubric_group": "mettle.envs.rubrics.rubric_group",
    "verifiers.utils.async_utils": "mettle.envs.signatures",
    "verifiers.utils.data_utils": "mettle.envs.parsers.answers",
    "verifiers.utils.env_utils": "mettle.envs.packages.loading",
    "verifiers.utils.tool_utils": "mettle.envs.tool_schema",
    "verifiers.utils.error_utils": "mettle.envs.errors",
}
_PACKAGES = (
    "verifiers.clients",
    "verifiers.envs",
    "verifiers.envs.experimental",
    "verifiers.parsers",
    "verifiers.rubrics",
    "verifiers.utils",
)


class _Verifiers(ModuleType):
    """`verifiers` or a package of it: every name of `mettle.envs`, and submodules under their historical paths."""

    def __init__(self, name: str, ours: ModuleType) -> None:
        super().__init__(name, ours.__doc__)
        self._ours = ours
        self.__path__: list[str] = []
        self.__all__ = [name for name in dir(ours) if not name.startswith("__")]

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._ours, name)


def install_verifiers_alias() -> None:
    """Make `import verifiers` and its submodules resolve to this library in this process. Doing it twice is harmless.

    Raises: UserError when another verifiers was imported before.
    """
    present = sys.modules.get("verifiers")
    if isinstance(present, _Verifiers):
        return
    if present is not None:
        raise UserError(
            f"another verifiers is imported already, from {getattr(present, '__file__', None)}; "
            "load environments before importing it, or in a process of their own"
        )
    ours = importlib.import_module("mettle.envs")
    modules: dict[str, ModuleType] = {name: _Verifiers(name, ours) for name in ("verifiers", *_PACKAGES)}
    modules.update({alias: importlib.import_module(target) for alias, target in _ALIASES.items()})
    for name, module in modules.items():
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent == "verifiers" or parent in _PACKAGES:
            setattr(modules[parent], child, module)
