"""Judgements by other hosts."""

from __future__ import annotations

import random
import secrets
from dataclasses import fields, replace
from types import TracebackType
from typing import Self

from mettle.errors import SandboxError
from mettle.sandbox.config import SandboxConfig
from mettle.sandbox.isolation import IsolationReport
from mettle.sandbox.judge.request import CodeJudge, JudgeRequest
from mettle.sandbox.judge.verdicts import JudgeResult
from mettle.sandbox.languages import LanguageReport
from mettle.sandbox.service.client.access import ServiceAccess
from mettle.sandbox.service.client.fleet import Fleet, Member
from mettle.sandbox.service.wire import pack, unpack


class RemoteJudge(CodeJudge):
    """Judges code at the services of a config. Use as `async with RemoteJudge(config) as judge`."""

    def __init__(
        self, config: SandboxConfig, *, access: ServiceAccess | None = None, rng: random.Random | None = None
    ) -> None:
        """`access` in place of the environment's token; `rng` decides between services that are equally busy."""
        self.config = config
        self._fleet = Fleet(config, "judge", lambda _, __: None, access=access, rng=rng)

    @property
    def isolation(self) -> IsolationReport:
        """What the services measured; with several, of the one that gives the least."""
        return self._fleet.isolation

    async def __aenter__(self) -> Self:
        try:
            await self._fleet.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def judge_request(self, request: JudgeRequest) -> JudgeResult:
        """The verdicts. A judgement whose service is lost is done by another one."""
        _ = self.isolation  # says that it has not been started
        given = {field.name: getattr(request, field.name) for field in fields(request)}
        body = {name: pack(value) for name, value in given.items() if value is not None}
        body["tests"] = [pack(test) for test in request.tests]
        key = secrets.token_hex(16)

        async def ask(member: Member) -> JudgeResult:
            answer = await member.connection.ask("POST", "/judge", json=body, key=key)
            result: JudgeResult = replace(
                unpack(answer["result"]), isolation=await member.connection.report(answer["isolation"])
            )
            return result

        result = await self._fleet.run(ask)
        if not result.isolation.meets(self.config.require):
            raise SandboxError(
                f"a sandbox service judged with isolation {result.isolation.grade!r} "
                f"and sandbox.require is {self.config.require!r}"
            )
        return result

    async def languages(self) -> tuple[LanguageReport, ...]:
        """What the least busy service can judge: each language's version, or what is missing."""

        async def ask(member: Member) -> tuple[LanguageReport, ...]:
            return tuple(unpack((await member.connection.ask("GET", "/languages"))["languages"]))

        return await self._fleet.run(ask)

    async def close(self) -> None:
        """Leave the services."""
        await self._fleet.close()
