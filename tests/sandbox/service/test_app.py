"""The service over plain HTTP: tokens, quotas, limits, pages, errors of one line, figures."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from mettle.errors import UserError
from mettle.sandbox import StdioTest
from mettle.sandbox.service import tokens as kept
from mettle.sandbox.service.config import QuotaConfig
from mettle.sandbox.service.wire import pack, unpack
from serving import ApiCaller, make_token, serving, wait_until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("_needs_isolation")]


async def test_a_wrong_token_is_told_nothing_and_a_new_one_counts_at_once(api: ApiCaller) -> None:
    for wrong in ("", "wrong", api.token[:-1], api.token + "x", api.token.upper()):
        status, body = await api.ask("GET", "/status", token=wrong)
        assert status == 401
        assert body["error"]["type"] == "token"
        assert "\n" not in body["error"]["message"]
    assert (await api.ask("GET", "/health", token=""))[0] == 200
    added = make_token(api.home, "later")
    assert (await api.ask("GET", "/status", token=added))[0] == 200
    kept.revoke_token(api.home / "tokens.json", "later")
    assert (await api.ask("GET", "/status", token=added))[0] == 401


async def test_tokens_are_kept_as_hashes_by_their_user_alone(api: ApiCaller) -> None:
    path = api.home / "tokens.json"
    assert api.token not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0
    path.write_text(path.read_text() + "garbage")
    assert (await api.ask("GET", "/status"))[0] == 200, "what was known stays known"
    path.write_text(path.read_text().removesuffix("garbage"))


async def test_machines_of_one_token_are_unknown_to_another(api: ApiCaller) -> None:
    machine = await api.create()
    other = make_token(api.home, "stranger")
    for method, path in (
        ("GET", ""), ("DELETE", ""), ("POST", "/exec"), ("GET", "/files?path=x"), ("GET", "/jobs")
    ):  # fmt: skip
        status, body = await api.ask(method, f"/machines/{machine}{path}", token=other)
        assert (status, body["error"]["type"]) == (404, "no_machine"), path
    url = f"{api.url}/api/v1/machines/{machine}/connect/80"
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await api.session.ws_connect(url, headers={"Authorization": f"Bearer {other}"})
    assert refused.value.status == 404
    assert (await api.ask("GET", "/machines", token=other))[1]["machines"] == []
    assert (await api.ask("DELETE", "/machines", token=other, json={"all": True}))[1] == {"deleted": []}
    assert (await api.ask("DELETE", f"/machines/{machine}"))[1]["status"] == "ended"


async def test_a_machine_over_the_quota_is_refused_and_room_comes_back(api: ApiCaller) -> None:
    token = make_token(api.home, "small", max_machines=2, max_memory_mb=1024, max_disk_mb=400)
    first = (await api.ask("POST", "/machines", token=token, json={"disk_mb": 100}))[1]["id"]
    status, body = await api.ask("POST", "/machines", token=token, json={"memory_mb": 600})
    assert (status, body["error"]["type"]) == (429, "quota")
    assert "max_memory_mb 1024" in body["error"]["message"]
    assert (await api.ask("POST", "/machines", token=token, json={"disk_mb": 301}))[1]["error"]["type"] == "quota"
    assert (await api.ask("POST", "/machines", token=token, json={"disk_mb": 100}))[0] == 201
    assert "max_machines 2" in (await api.ask("POST", "/machines", token=token))[1]["error"]["message"]
    await api.ask("DELETE", f"/machines/{first}", token=token)
    assert (await api.ask("POST", "/machines", token=token, json={"disk_mb": 100, "lifetime_s": 0.3}))[0] == 201

    async def has_room() -> bool:
        return (await api.ask("POST", "/machines", token=token, json={"disk_mb": 100}))[0] == 201

    await wait_until(has_room)  # when one's time is over
    await api.ask("DELETE", "/machines", token=token, json={"all": True})


async def test_requests_and_judgements_over_the_quota_are_told_to_come_back(api: ApiCaller) -> None:
    token = make_token(api.home, "slow", max_judging=1)
    slow = {"code": "import time; time.sleep(600)", "tests": [{"stdin": ""}], "timeout_s": 100}
    first = asyncio.create_task(api.ask("POST", "/judge", token=token, json=slow))
    await wait_until(lambda: asyncio.sleep(0, api.service.num_judging == 1))
    status, body = await api.ask("POST", "/judge", token=token, json=slow)
    assert (status, body["error"]["type"]) == (429, "busy")
    first.cancel()
    await wait_until(lambda: asyncio.sleep(0, api.service.num_judging == 0))
    quick = {"code": "print(1)", "tests": [{"stdin": ""}]}
    assert (await api.ask("POST", "/judge", token=token, json=quick))[0] == 200
    often = make_token(api.home, "often", max_requests_per_s=0.001)
    assert [(await api.ask("GET", "/status", token=often))[0] for _ in range(2)] == [200, 429]
    assert (await api.ask("GET", "/status"))[0] == 200, "others are not held up"


async def test_plain_json_judges_programs_and_functions(api: ApiCaller) -> None:
    tests = [{"stdin": "2", "expected": "4"}, {"stdin": "3", "expected": "7"}]
    status, body = await api.ask("POST", "/judge", json={"code": "print(int(input()) ** 2)", "tests": tests})
    assert status == 200
    assert body["grade"] == "ns"
    verdicts = [test["verdict"]["$enum"][1] for test in body["result"]["tests"]["$tuple"]]
    assert verdicts == ["passed", "wrong"]
    called = [{"function": "f", "args": [1, 2], "expected": 3}]
    _, body = await api.ask("POST", "/judge", json={"code": "def f(a, b): return a + b", "tests": called})
    assert body["has_passed"] is True
    report = (await api.ask("GET", f"/isolation/{body['isolation']}"))[1]["report"]
    assert unpack(report).grade == "ns"


async def test_the_same_key_gives_the_same_machine_and_another_request_under_it_is_refused(api: ApiCaller) -> None:
    key = {"Idempotency-Key": "one"}
    made = await asyncio.gather(*(api.ask("POST", "/machines", json={"disk_mb": 64}, headers=key) for _ in range(5)))
    assert len({body["id"] for _, body in made}) == 1
    status, body = await api.ask("POST", "/machines", json={"disk_mb": 65}, headers=key)
    assert status == 400
    assert "idempotency key" in body["error"]["message"]
    other = await api.ask("POST", "/machines", json={"disk_mb": 64}, headers=key, token=make_token(api.home, "third"))
    assert other[1]["id"] != made[0][1]["id"], "keys of different tokens are different"
    await api.ask("DELETE", "/machines", json={"all": True})


async def test_machines_are_listed_by_label_page_by_page(api: ApiCaller) -> None:
    for number in range(7):
        await api.create(labels={"run": "a" if number % 2 else "b", "all": ""}, disk_mb=16)
    seen: list[str] = []
    cursor = ""
    while True:
        _, page = await api.ask("GET", f"/machines?status=running&label=all&limit=3&cursor={cursor}")
        seen += [machine["id"] for machine in page["machines"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
        assert len(page["machines"]) == 3
    assert len(seen) == len(set(seen)) == 7
    _, page = await api.ask("GET", "/machines?status=running&label=run=a")
    assert len(page["machines"]) == 3
    assert len((await api.ask("DELETE", "/machines", json={"labels": {"run": "a"}}))[1]["deleted"]) == 3
    _, shown = await api.ask("GET", f"/machines/{page['machines'][0]['id']}")
    assert (shown["status"], shown["why_ended"]) == ("ended", "it was deleted")
    status, body = await api.ask("POST", f"/machines/{shown['id']}/exec", json={"command": "true"})
    assert (status, body["error"]["type"]) == (410, "machine_ended")
    await api.ask("DELETE", "/machines", json={"all": True})


async def test_ten_thousand_handles_are_listed_in_pages(api: ApiCaller) -> None:
    register, holder = api.service.register, kept.Holder("many", QuotaConfig(max_machines=20_000))
    made = await register.create(holder, "", _tiny())
    for number in range(10_000):
        clone = type(made)(
            register._num_made + number + 1, _Named(made.machine, f"m-{number}"), "many", "", lambda: None
        )
        register._records[clone.id] = clone
    register._num_made += 10_000
    num_seen, cursor, num_pages = 0, None, 0
    while True:
        found, cursor = register.page(holder, {}, "running", 1000, cursor)
        num_seen, num_pages = num_seen + len(found), num_pages + 1
        if cursor is None:
            break
    assert (num_seen, num_pages) == (10_001, 11)
    for number in range(10_000):
        del register._records[f"m-{number}"]
    await register.delete(made)


class _Named:
    """A machine under another name."""

    def __init__(self, machine: Any, name: str) -> None:
        self.id, self.config, self.isolation, self.is_alive = name, machine.config, machine.isolation, True


def _tiny() -> Any:
    from mettle.sandbox import MachineConfig

    return MachineConfig(disk_mb=1)


async def test_figures_are_those_of_what_happened(api: ApiCaller) -> None:
    async def figures() -> dict[str, float]:
        _, page = await api.ask("GET", "/metrics")
        lines = [line for line in page.decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    before = await figures()
    machine = await api.create()
    await api.ask("POST", f"/machines/{machine}/exec", json={"command": "true"})
    await api.ask("POST", "/judge", json={"code": "print(1)", "tests": [{"expected": "1"}]})
    await api.ask("GET", "/machines/m-0")
    after = await figures()

    def grew(name: str) -> float:
        return after.get(f"mettle_sandbox_{name}", 0) - before.get(f"mettle_sandbox_{name}", 0)

    assert grew("machines") == 1
    assert grew("exec_seconds_count") == 1
    assert grew("create_seconds_count") == 1
    assert grew("judge_seconds_count") == 1
    assert grew('verdicts_total{verdict="passed"}') == 1
    assert grew('errors_total{cause="no_machine"}') == 1
    assert grew('requests_total{route="POST /api/v1/judge",status="200"}') == 1
    assert after['mettle_sandbox_judge_seconds_bucket{le="+Inf"}'] == after["mettle_sandbox_judge_seconds_count"]
    await api.ask("DELETE", f"/machines/{machine}")


async def test_a_service_without_a_token_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kept.TOKEN_ENV, raising=False)
    with pytest.raises(UserError, match="needs a token"):
        async with serving(tmp_path):
            pass
    monkeypatch.setenv(kept.TOKEN_ENV, "short")
    with pytest.raises(UserError, match="16 or more"):
        async with serving(tmp_path):
            pass
    monkeypatch.setenv(kept.TOKEN_ENV, "long enough to be one")
    async with serving(tmp_path) as (_, url), aiohttp.ClientSession() as session:
        headers = {"Authorization": "Bearer long enough to be one"}
        async with session.get(f"{url}/api/v1/status", headers=headers) as response:
            assert (await response.json())["token"]["name"] == "env"


async def test_values_travel_exactly() -> None:
    values = [
        None, True, 1, -(1 << 80), 1.5, float("inf"), "text\ud800", b"\0\xff", [1, (2,)], {1: "a"}, {"$tuple": [1]},
        {"a": {"$b": 1}}, {1, 2}, frozenset({"x"}), StdioTest("1", b"2"),
    ]  # fmt: skip
    for value in values:
        again = unpack(json.loads(json.dumps(pack(value))))
        assert again == value
        assert type(again) is type(value)
    assert unpack(pack(float("nan"))) != unpack(pack(float("nan")))
    with pytest.raises(UserError, match="object"):
        pack(object())


async def test_a_streamed_answer_is_lines_of_base64(api: ApiCaller) -> None:
    machine = await api.create()
    order = {"command": r"printf '\377\000'; echo e >&2; exit 3", "stream": "chunks"}
    _, data = await api.ask("POST", f"/machines/{machine}/exec", json=order)
    lines = [json.loads(line) for line in data.decode().splitlines()]
    assert b"".join(base64.b64decode(line["stdout"]) for line in lines if "stdout" in line) == b"\xff\0"
    assert lines[-1]["result"]["exit_code"] == 3
    await api.ask("DELETE", f"/machines/{machine}")
