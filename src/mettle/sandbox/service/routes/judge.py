"""Judgements: code and tests in, verdicts out, with the name of the isolation report that was in force."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from mettle.errors import UserError
from mettle.sandbox.judge.request import JudgeRequest
from mettle.sandbox.judge.verdicts import CallTest, InteractiveTest, JudgeResult, ProgramChecker, StdioTest, Test
from mettle.sandbox.service.answers import json_answer
from mettle.sandbox.service.bodies import ReadBody, read_digested
from mettle.sandbox.service.state import SandboxService, holder_of, key_of, service_of
from mettle.sandbox.service.wire import pack, unpack

_FIELDS: Final = {field.name for field in fields(JudgeRequest)}


async def judge(request: Request) -> Response:
    """Judge `code` on `tests`; the other fields are the arguments of `Judge.judge`.

    A test is `{"stdin", "expected"}`, `{"function", "args", "expected"}` or `{"interactor", "stdin", "expected"}`, with
    the other fields of `StdioTest`, `CallTest` and `InteractiveTest`.
    """
    service, holder = service_of(request), holder_of(request)
    if service.judge is None:
        raise UserError(f"the backend {service.config.sandbox.backend!r} of this service judges nothing")
    with service.quotas.judging(holder):
        body = await read_digested(request)
        key = key_of(request, "judge")
        service.num_judging += 1
        try:
            return json_answer(await service.idempotent.run(key, body.digest, lambda: _judge(service, body)))
        finally:
            service.num_judging -= 1


async def languages(request: Request) -> Response:
    """What can be judged: each language's version, or what is missing."""
    ask = getattr(service_of(request).judge, "languages", None)
    return json_answer({"languages": pack(list(await ask())) if ask is not None else []})


async def _judge(service: SandboxService, body: ReadBody) -> dict[str, Any]:
    assert service.judge is not None, "asked for before"
    asked = await asyncio.to_thread(_asked, body.fields) if body.is_long else _asked(body.fields)
    started = time.monotonic()
    result = await service.judge.judge_request(asked)
    metrics = service.metrics
    metrics.add_time("judge_queue_seconds", result.queue_s)
    metrics.add_time("judge_seconds", max(0.0, time.monotonic() - started - result.queue_s))
    for test in result.tests:
        metrics.count("verdicts_total", verdict=str(test.verdict))
    return await asyncio.to_thread(_answer, service, result) if body.is_long else _answer(service, result)


def _asked(fields: dict[str, Any]) -> JudgeRequest:
    return _request(unpack(fields))


def _answer(service: SandboxService, result: JudgeResult) -> dict[str, Any]:
    bare: Any = replace(result, isolation=None)  # type: ignore[arg-type]
    return {
        "result": pack(bare),
        "isolation": service.seen(result.isolation),
        "grade": result.isolation.grade,
        "has_passed": result.has_passed,
    }


def _request(order: dict[str, Any]) -> JudgeRequest:
    """Raises: UserError for what is no judgement. What is wrong with its values the judge says."""
    unknown = set(order) - _FIELDS
    if unknown or "code" not in order:
        raise UserError(f"a judgement has code, tests and options; it must not have {sorted(unknown) or 'no code'}")
    tests = order.get("tests", [])
    if not isinstance(tests, list | tuple):
        raise UserError(f"tests must be a list, not {type(tests).__name__}")
    return JudgeRequest(**{**order, "tests": [_test(test) for test in tests]})


def _test(test: Any) -> Any:
    """A test as a person writes it in JSON; one that came as a record is one already."""
    if not isinstance(test, Mapping):
        return test
    kind: type[Test] = CallTest if "function" in test else InteractiveTest if "interactor" in test else StdioTest
    unknown = set(test) - {field.name for field in fields(kind)}
    if unknown:
        raise UserError(f"a {kind.__name__} has no {sorted(unknown)}")
    held = dict(test)
    if isinstance(held.get("interactor"), Mapping):
        held["interactor"] = _interactor(held["interactor"])
    if isinstance(held.get("args"), list):
        held["args"] = tuple(held["args"])
    return kind(**held)


def _interactor(given: Mapping[str, Any]) -> ProgramChecker:
    unknown = set(given) - {field.name for field in fields(ProgramChecker)}
    if unknown or "code" not in given:
        raise UserError(f"an interactor is a ProgramChecker; it has no {sorted(unknown) or 'code'}")
    return ProgramChecker(**given)
