"""The service itself: whether it is well, how busy it is, what isolation it gives, and its figures for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mettle.sandbox.service.answers import json_answer
from mettle.sandbox.service.faults import NoMachine
from mettle.sandbox.service.metrics import MetricSample
from mettle.sandbox.service.state import SandboxService, holder_of, service_of
from mettle.sandbox.service.tokens import GIVEN, LOCAL
from mettle.sandbox.service.wire import pack


async def health(request: Request) -> Response:
    """Whether it takes requests; the one route that needs no token."""
    is_closing = service_of(request).is_closing
    return json_answer({"status": "closing" if is_closing else "ok"}, status=503 if is_closing else 200)


async def status(request: Request) -> Response:
    """How busy it is, what isolation it gives, and what the token has and may have."""
    service, holder = service_of(request), holder_of(request)
    judge = service.judge
    body = {
        "backend": service.config.sandbox.backend,
        "python_packages": list(service.config.sandbox.python_packages),
        "judge": judge and {"isolation": service.seen(judge.isolation), "grade": judge.isolation.grade},
        "machines": {
            "isolation": service.seen(service.register.pool.isolation),
            "grade": service.register.pool.isolation.grade,
        },
        "reports": {name: pack(report) for name, report in service.reports.items()},
        "load": load(service),
        "lease_s": service.config.lease_s,
        "token": {
            "name": holder.name,
            "quota": holder.quota.model_dump(),
            "num_machines": service.quotas.of(holder).num_machines,
        },
    }
    return json_answer(body)


def load(service: SandboxService) -> dict[str, int]:
    """The figures that a client spreads its work by."""
    return {
        "num_judging": service.num_judging,
        "max_running": service.config.sandbox.max_running,
        "num_machines": service.register.num_running + service.register.num_making,
        "max_machines": service.config.quota.max_machines,
    }


async def report(request: Request) -> Response:
    """An isolation report by the name that a result has."""
    name = request.path_params["name"]
    found = service_of(request).reports.get(name)
    if found is None:
        raise NoMachine(f"there is no isolation report {name!r}")
    return json_answer({"report": pack(found)})


async def metrics(request: Request) -> Response:
    """The page for Prometheus. The figures of other tokens are shown to the service's own token (or socket) alone."""
    service, holder = service_of(request), holder_of(request)
    service.register.sweep()

    def is_shown(token: str) -> bool:
        return token == holder.name or holder.name in (GIVEN, LOCAL)

    pool = getattr(service.judge, "stats", None)
    return service.metrics.page([*_of_the_service(service, pool), *_of_tokens(service)], is_shown)


def _of_the_service(service: SandboxService, pool: Any) -> Iterator[MetricSample]:
    running = int(getattr(pool, "num_running", service.num_judging))
    figures: dict[str, float] = {
        "judge_queue": max(0, service.num_judging - running),
        "judge_running": running,
        "judge_slots": service.config.sandbox.max_running,
        "judge_warm": int(getattr(pool, "num_warm", 0)),
        "machines": service.register.num_running,
        "machines_making": service.register.num_making,
        "cpus": service.quotas.cpus,
        "requests_open": service.num_open,
        **{f"judge_{name}_total": int(getattr(pool, f"num_{name}", 0)) for name in ("cells", "cells_lost")},
        "judge_remembered_total": int(getattr(pool, "num_remembered", 0)),
    }
    for name, value in figures.items():
        yield MetricSample(name, {}, value)


def _of_tokens(service: SandboxService) -> Iterator[MetricSample]:
    for name, account in sorted(service.quotas.accounts.items()):
        quota = account.quota
        figures: dict[str, float] = {
            "machines": account.num_machines,
            "max_machines": quota.max_machines,
            "memory_bytes": account.memory_mb << 20,
            "max_memory_bytes": (quota.max_memory_mb or 0) << 20,
            "disk_bytes": account.disk_mb << 20,
            "max_disk_bytes": (quota.max_disk_mb or 0) << 20,
            "cpus": account.cpus,
            "max_cpus": quota.max_cpus or 0.0,
            "judging": account.num_judging,
            "max_judging": quota.max_judging,
            "requests_open": account.num_requests,
        }
        for what, value in figures.items():
            yield MetricSample(f"token_{what}", {"token": name}, value)
