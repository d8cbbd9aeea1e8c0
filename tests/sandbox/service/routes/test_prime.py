"""The calls of the `prime` sandbox clients of the first era, as they stand on the wire.

`prime-sandboxes` 0.2.42 itself was run against the service by hand: create, wait, exec, time-out, uploads, downloads,
read-file, background jobs, list, logs, bulk delete, and the errors of a deleted and of an unknown sandbox.
"""

from __future__ import annotations

import aiohttp
import pytest

from serving import ApiCaller

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("_needs_isolation")]

REQUIRED = (
    "id", "name", "dockerImage", "cpuCores", "memoryGB", "diskSizeGB", "diskMountPath", "gpuCount", "status",
    "timeoutMinutes", "createdAt", "updatedAt",
)  # fmt: skip


async def created(api: ApiCaller, **changes: object) -> dict[str, object]:
    body = {"name": "acc", "docker_image": "python:3.11-slim", "disk_size_gb": 0.1, "timeout_minutes": 10, **changes}
    status, made = await api.ask("POST", "/sandbox", json=body)
    assert status == 201, made
    return dict(made)


async def test_a_sandbox_is_described_as_the_clients_read_it(api: ApiCaller) -> None:
    made = await created(api, labels=["a", "b"], cpu_cores=2.0, idempotency_key="k1", environment_vars={"A": "1"})
    assert all(made[name] is not None for name in REQUIRED)
    assert (made["status"], made["labels"], made["cpuCores"], made["timeoutMinutes"]) == (
        "RUNNING",
        ["a", "b"],
        2.0,
        10,
    )
    again = await created(api, labels=["a", "b"], cpu_cores=2.0, idempotency_key="k1", environment_vars={"A": "1"})
    assert again["id"] == made["id"], "a retry adopts"
    _, page = await api.ask("GET", "/sandbox?labels=a&labels=b&per_page=1")
    assert (page["total"], page["has_next"], page["sandboxes"][0]["id"]) == (1, False, made["id"])
    _, states = await api.ask("POST", "/sandbox/status:batchGet", json={"sandbox_ids": [made["id"], "nope"]})
    assert states["statuses"][0]["status"] == "RUNNING"
    assert states["errors"][0]["code"] == "NOT_FOUND"
    _, deleted = await api.ask("DELETE", "/sandbox", json={"sandbox_ids": [made["id"], "nope"]})
    assert deleted["succeeded"] == [made["id"]]
    assert deleted["failed"][0]["sandbox_id"] == "nope"
    _, shown = await api.ask("GET", f"/sandbox/{made['id']}")
    assert (shown["status"], shown["terminatedAt"] is None) == ("TERMINATED", False)
    assert (await api.ask("GET", "/sandbox/nope"))[0] == 404


async def test_an_image_that_the_backend_does_not_have_is_refused_by_both_apis(api: ApiCaller) -> None:
    asked = {"name": "x", "docker_image": "pytorch/pytorch:2.0", "disk_size_gb": 0.1}
    status, told = await api.ask("POST", "/sandbox", json=asked)
    assert (status, "'pytorch/pytorch:2.0'" in told["detail"]) == (400, True)
    status, told = await api.ask("POST", "/machines", json={"image": "pytorch/pytorch:2.0"})
    assert (status, "host_images" in told["error"]["message"]) == (400, True)
    assert (await api.ask("POST", "/machines", json={"image": "python:3.12-slim"}))[0] == 201


async def test_a_pass_is_for_one_sandbox_and_its_commands_and_files(api: ApiCaller) -> None:
    made, other = await created(api), await created(api)
    _, gate = await api.ask("POST", f"/sandbox/{made['id']}/auth")
    base, token = f"/gw/{gate['user_ns']}/{gate['job_id']}", gate["token"]
    assert gate["gateway_url"] == f"{api.url}/gw"
    port = api.url.rpartition(":")[2]
    _, named = await api.ask("POST", f"/sandbox/{made['id']}/auth", headers={"Host": f"localhost:{port}@evil.example"})
    assert named["gateway_url"] == f"{api.url}/gw", "what the caller calls us is not repeated"
    order = {"command": "echo $A; exit 7", "env": {"A": "b"}, "working_dir": "/tmp", "timeout": 5}
    assert (await api.ask("POST", f"{base}/exec", token=token, json=order))[1] == {
        "stdout": "b\n", "stderr": "", "exit_code": 7,
    }  # fmt: skip
    slow = {"command": "sleep 9", "timeout": 1}
    assert (await api.ask("POST", f"{base}/exec", token=token, json=slow))[0] == 408
    form = aiohttp.FormData()
    form.add_field("file", b"hello\nworld\n", filename="x")
    status, told = await api.ask("POST", f"{base}/upload?path=/app/x", token=token, data=form)
    assert (status, told["success"], told["size"]) == (200, True, 12)
    assert (await api.ask("GET", f"{base}/download?path=/app/x", token=token))[1] == b"hello\nworld\n"
    _, window = await api.ask("GET", f"{base}/read-file?path=/app/x&offset=-6&length=100", token=token)
    assert (window["content"], window["total_size"], window["truncated"]) == ("world\n", 12, True)
    assert (await api.ask("GET", f"{base}/download?path=/app/y", token=token))[0] == 404
    stolen = f"/gw/m/{other['id']}/exec"
    assert (await api.ask("POST", stolen, token=token, json=order))[0] == 401, "not for another sandbox"
    assert (await api.ask("GET", "/machines", token=token))[0] == 401, "and not for the service"
    await api.ask("DELETE", f"/sandbox/{made['id']}")
    status, gone = await api.ask("POST", f"{base}/exec", token=token, json=order)
    assert (status, gone["error"]) == (502, "sandbox_not_found")
    await api.ask("DELETE", f"/sandbox/{other['id']}")


async def test_a_start_command_runs_and_its_output_is_the_log(api: ApiCaller) -> None:
    made = await created(api, start_command="echo started; sleep 60")
    _, gate = await api.ask("POST", f"/sandbox/{made['id']}/auth")
    await api.ask("POST", f"/gw/m/{made['id']}/exec", token=gate["token"], json={"command": "sleep 0.3"})
    assert (await api.ask("GET", f"/sandbox/{made['id']}/logs"))[1] == {"logs": "started\n"}
    await api.ask("DELETE", f"/sandbox/{made['id']}")


@pytest.mark.parametrize(
    "wrong", [{"timeout_minutes": 0}, {"memory_gb": -1}, {"disk_size_gb": "big"}, {"environment_vars": {"A=B": "1"}}]
)
async def test_what_is_wrong_with_a_request_is_its_detail(api: ApiCaller, wrong: dict[str, object]) -> None:
    status, body = await api.ask("POST", "/sandbox", json={"name": "x", **wrong})
    assert status == 400
    assert "\n" not in body["detail"]
