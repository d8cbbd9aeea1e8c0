"""The keywords of `RLMEnv` by the names that its releases had.

Parts: `ready_settings`. Invariant: what would change what is measured, and is not offered, is refused and not ignored.
"""

from __future__ import annotations

from typing import Any

from mettle.errors import UserError

RENAMED = {"max_iterations": "max_turns"}
SANDBOX = (
    "docker_image", "start_command", "cpu_cores", "memory_gb", "disk_size_gb", "gpu_count", "timeout_minutes",
    "environment_vars", "team_id", "advanced_configs", "labels", "client_max_workers", "client_max_connections",
    "client_max_keepalive_connections",
)  # fmt: skip
NOT_OFFERED = {
    "include_sub_llm_in_trajectory": "calls of sub-models are counted, and are no steps of the trajectory",
    "enable_summarization": "a conversation that grows too long can be cut with a ContextWindow",
}
DEFAULTS: dict[str, Any] = {
    "docker_image": "python:3.11-slim", "start_command": "tail -f /dev/null", "cpu_cores": 1, "memory_gb": 2,
    "disk_size_gb": 5, "gpu_count": 0, "timeout_minutes": 60, "environment_vars": None, "team_id": None,
    "advanced_configs": None, "labels": None,
}  # fmt: skip


def ready_settings(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keywords of an environment, and those of a sandbox, out of what was given.

    Raises: UserError for one that is on and not offered.
    """
    settings, sandbox = dict(given), dict(DEFAULTS)
    for name, instead in NOT_OFFERED.items():
        if settings.pop(name, False):
            raise UserError(f"{name} of RLMEnv is not offered here: {instead}")
    settings.pop("sub_tool_max_turns", None)
    for older, name in RENAMED.items():
        if older in settings:
            settings[name] = settings.pop(older)
    for name in SANDBOX:
        for key in (name, f"sandbox_{name}"):
            if key in settings:
                own = f"sandbox_{name}" if name.startswith("client_") else name
                sandbox[own] = settings.pop(key)
    return settings, sandbox
