"""Keeps one template process alive for a pool: starts it, buries a dead one, and gives up when they die in a row."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from mettle.errors import SandboxError, UserError
from mettle.sandbox.config import SandboxConfig
from mettle.sandbox.templates import TemplateProcess

logger = logging.getLogger(__name__)

MAX_DEATHS: Final = 5
_DEATHS_WINDOW_S: Final = 10.0
_BACKENDS: Final = ("zygote", "unsafe")


class TemplateKeeper:
    """`living` is the template of the moment; `on_death` lets the pool forget what died with the last one.

    Where the host allows no namespaces, and the config names the grade that does without, and the pool `can_do_alone`,
    the template is one that does without; `refusals` is then what kept it from the better one.
    """

    def __init__(self, config: SandboxConfig, on_death: Callable[[], None], *, can_do_alone: bool = False) -> None:
        if config.backend not in _BACKENDS:
            raise UserError(
                f"backend {config.backend!r} is not one of this process; use open_judge(config), open_machines(config)"
            )
        self._config = config
        self._on_death = on_death
        self._lock = asyncio.Lock()
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)
        self.template: TemplateProcess | None = None
        self.num_templates = 0
        self.refusals: dict[str, str] = {}
        self._may_do_alone = can_do_alone and config.allows_landlock_only and config.backend != "unsafe"

    async def living(self) -> TemplateProcess:
        """The running template, or a new one; SandboxError if they die as fast as they are made."""
        async with self._lock:
            if self.template is not None and self.template.is_alive:
                return self.template
            if self.template is not None:
                await self._bury(self.template)
            started = await self._start(is_landlocked=bool(self.refusals))
            if not started.is_ready and self._may_do_alone and not self.refusals:
                self.refusals = started.layers
                await started.close()
                started = await self._start(is_landlocked=True)
            return started

    async def _start(self, *, is_landlocked: bool) -> TemplateProcess:
        self.num_templates += 1
        self.template = template = TemplateProcess(self._config, self.num_templates, is_landlocked=is_landlocked)
        try:
            await template.wait_ready()
        except BaseException:  # whoever waited may have been cancelled; the next one must not find half a start
            self.template = None
            await template.close()
            raise
        return template

    def has_lost(self, generation: int) -> bool:
        """Whether the template that made something has ended, and that something with it."""
        template = self.template
        return template is None or not template.is_alive or template.generation != generation

    async def kill(self, number: int, generation: int) -> None:
        """End a cell or machine at once."""
        if self.template is not None:
            await self.template.kill(number, generation)

    async def close(self) -> None:
        """End the template, and all that it made."""
        if self.template is not None:
            await self.template.close()
            self.template = None

    async def _bury(self, template: TemplateProcess) -> None:
        logger.warning("the sandbox's template process ended; starting another", extra={"pid": template.pid})
        await template.close()
        self.template = None
        self._on_death()
        now = time.monotonic()
        self._deaths.append(now)
        if len(self._deaths) == MAX_DEATHS and now - self._deaths[0] < _DEATHS_WINDOW_S:
            raise SandboxError(f"the sandbox's template process ended {MAX_DEATHS} times in a few seconds")


def why_not_ready(template: TemplateProcess) -> str:
    """Which stage of a template's set-up failed."""
    return "; ".join(f"{stage}: {why}" for stage, why in template.layers.items() if why)
