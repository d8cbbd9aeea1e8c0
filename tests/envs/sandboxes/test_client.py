"""The sandbox client that environments call directly, and the name they import it by."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
import pytest_asyncio

from mettle.envs import sandboxes as prime
from mettle.sandbox import SandboxConfig, probe

SOURCE = Path(__file__).resolve().parents[3] / "src"
needs_isolation = pytest.mark.skipif(
    not probe(SandboxConfig()).is_at_least("ns"), reason="this host cannot isolate code; environments refuse it, too"
)


@pytest_asyncio.fixture
async def client():
    made = prime.ThreadedAsyncSandboxClient(max_workers=3)
    yield made
    left = (await made.list(labels=["test"], exclude_terminated=True)).sandboxes
    await made.bulk_delete([sandbox.id for sandbox in left])
    made.teardown()


@pytest_asyncio.fixture
async def box(client):
    request = prime.CreateSandboxRequest(
        name="box", docker_image="python:3.11-slim", labels=["test"], environment_vars={"A": "1"}, secrets={"B": "2"}
    )
    return await client.create(request)


@needs_isolation
async def test_a_command_runs_with_its_directory_and_variables(client, box):
    await client.wait_for_creation(box.id, max_attempts=3)
    await client.execute_command(box.id, "mkdir -p /data")
    done = await client.execute_command(box.id, "pwd; echo $A$B$C; exit 4", working_dir="/data", env={"C": "3"})
    assert (done.stdout, done.stderr, done.exit_code) == ("/data\n123\n", "", 4)
    assert (await client.execute_command(box.id, "[[ ab == a* ]] && echo bash")).stdout == "bash\n"


@needs_isolation
async def test_a_command_that_takes_too_long_raises_and_the_sandbox_goes_on(client, box):
    with pytest.raises(prime.CommandTimeoutError, match="timed out after 1s") as raised:
        await client.execute_command(box.id, "sleep 50", timeout=1)
    assert raised.value.sandbox_id == box.id
    assert (await client.execute_command(box.id, "echo on")).stdout == "on\n"


@needs_isolation
async def test_files_travel_both_ways(client, box, tmp_path):
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(bytes(range(256)))
    answer = await client.upload_file(box.id, "/data/in", str(source))
    assert (answer.success, answer.size, answer.path) == (True, 256, "/data/in")
    await client.download_file(box.id, "/data/in", str(target))
    assert target.read_bytes() == source.read_bytes()
    await client.upload_bytes(box.id, "/data/text", b"one two three", "text")
    part = await client.read_file(box.id, "/data/text", offset=4, length=3)
    assert (part.content, part.size, part.total_size, part.truncated) == ("two", 3, 13, True)
    with pytest.raises(prime.SandboxFileNotFoundError):
        await client.read_file(box.id, "/nothing")
    with pytest.raises(prime.APIError, match="could not be read"):
        await client.read_file(box.id, "/data")
    with pytest.raises(prime.APIError, match="could not be written"):
        await client.upload_bytes(box.id, "/data", b"x", "x")


@needs_isolation
async def test_a_background_job_is_followed_to_its_end(client, box):
    until_told = "while [ ! -e /tmp/go ]; do sleep 0.02; done"
    job = await client.start_background_job(box.id, f"echo out; echo err >&2; {until_told}; exit 7", working_dir="/tmp")
    assert not (await client.get_background_job(box.id, job)).completed
    await client.execute_command(box.id, "touch /tmp/go")
    while not (status := await client.get_background_job(box.id, job)).completed:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    assert (status.exit_code, status.stdout, status.stderr) == (7, "out\n", "err\n")
    shown = await client.execute_command(box.id, f"cat {job.stdout_log_file} {job.exit_file}")
    assert shown.stdout == "out\n7\n"
    ran = await client.run_background_job(box.id, "echo waited for; pwd", timeout=100, working_dir="/tmp")
    assert ran.stdout == "waited for\n/tmp\n"
    with pytest.raises(prime.CommandTimeoutError):
        await client.run_background_job(box.id, "sleep 60", timeout=1)


@needs_isolation
async def test_sandboxes_are_listed_looked_at_and_deleted(client, box):
    other = await client.create(prime.CreateSandboxRequest(name="other", labels=["test", "second"]))
    assert {sandbox.id for sandbox in (await client.list(labels=["test"])).sandboxes} >= {box.id, other.id}
    assert [sandbox.id for sandbox in (await client.list(labels=["second"])).sandboxes] == [other.id]
    assert (await client.get(box.id)).status == "RUNNING"
    assert (await client.get(box.id)).isolation == "ns"
    answer = await client.bulk_delete(labels=["second"])
    assert answer.succeeded == [other.id]
    await client.delete(box.id)
    await client.delete(box.id)
    for attempt in (client.get(box.id), client.execute_command(box.id, "true"), client.wait_for_creation(box.id)):
        with pytest.raises(prime.SandboxNotRunningError):
            await attempt


@needs_isolation
async def test_a_sandbox_whose_time_is_over_says_so(client):
    box = await client.create(prime.CreateSandboxRequest(name="short", labels=["test"], timeout_minutes=0.005))
    while (seen := await client.get(box.id)).status == "RUNNING":  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    with pytest.raises(prime.SandboxTimeoutError, match="lifetime"):
        await client.execute_command(box.id, "true")
    assert seen.status == "TIMEOUT"
    assert "lifetime" in seen.termination_reason


@needs_isolation
async def test_a_start_command_runs_in_the_background(client):
    request = prime.CreateSandboxRequest(name="started", labels=["test"], start_command="echo begun > /work/begun")
    box = await client.create(request)
    shown = await client.execute_command(box.id, "while [ ! -e begun ]; do sleep 0.02; done; cat begun", timeout=100)
    assert shown.stdout == "begun\n"


@needs_isolation
def test_the_blocking_client_does_the_same():
    client = prime.SandboxClient(prime.APIClient(api_key="unused"))
    box = client.create(prime.CreateSandboxRequest(name="blocking", labels=["test"]))
    assert client.execute_command(box.id, "echo 1").stdout == "1\n"
    client.delete(box.id)
    with pytest.raises(AttributeError):
        _ = client.no_such_call


@needs_isolation
async def test_a_request_gets_no_more_than_is_configured(client):
    prime.configure(max_memory_mb=128, max_disk_mb=64)
    try:
        box = await client.create(
            prime.CreateSandboxRequest(name="big", labels=["test"], memory_gb=64, disk_size_gb=1000)
        )
        shown = await client.execute_command(box.id, "df -m --output=size /work | tail -1")
    finally:
        prime.configure(max_memory_mb=8192, max_disk_mb=2048)
    assert shown.stdout.strip() == "64"
    assert box.memory_gb == 0.125


def test_a_request_is_copied_with_changes_and_tolerates_fields_of_other_versions():
    request = prime.CreateSandboxRequest(name="a", labels=["x"], invented_later=3)
    other = request.model_copy(update={"name": "b"}, deep=True)
    other.labels.append("y")
    assert (request.name, other.name, request.labels, other.labels) == ("a", "b", ["x"], ["x", "y"])
    assert request.model_dump()["invented_later"] == 3
    assert prime.CreateSandboxRequest(name="c").labels == []
    with pytest.raises(TypeError, match="needs 'name'"):
        prime.CreateSandboxRequest()


ALIAS = """
import sys
from mettle.envs.legacy.prime_sandboxes import install_prime_sandboxes_alias
install_prime_sandboxes_alias(); install_prime_sandboxes_alias()
import prime_sandboxes
from prime_sandboxes import AdvancedConfigs, AsyncSandboxClient, CreateSandboxRequest
from prime_sandboxes.core import APIClient
from prime_sandboxes.exceptions import CommandTimeoutError
print(prime_sandboxes.__doc__.splitlines()[0], AsyncSandboxClient.__module__)
"""


def run_python(code: str, *paths: Path) -> str:
    path = os.pathsep.join([str(SOURCE), *map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_name_leads_here():
    assert "mettle.envs.sandboxes.client" in run_python(ALIAS)


def test_an_installed_one_is_not_shadowed(tmp_path):
    (tmp_path / "prime_sandboxes").mkdir()
    (tmp_path / "prime_sandboxes" / "__init__.py").write_text("REAL = True")
    code = ALIAS.split("import prime_sandboxes\n")[0] + "import prime_sandboxes; print(prime_sandboxes.REAL)"
    assert run_python(code, tmp_path) == "True\n"


DIRECT = """
import verifiers as vf
from prime_sandboxes import AsyncSandboxClient, CommandTimeoutError, CreateSandboxRequest
from verifiers.envs.sandbox_env import SandboxEnv, SandboxMonitorRubric
from verifiers.envs.experimental.sandbox_mixin import SandboxMixin
from verifiers.utils.threaded_sandbox_client import ThreadedAsyncSandboxClient

class Direct(vf.SingleTurnEnv):
    async def setup_state(self, state):
        client = AsyncSandboxClient()
        box = await client.create(CreateSandboxRequest(name="direct", docker_image="python:3.11-slim"))
        state["said"] = (await client.execute_command(box.id, "echo from a sandbox")).stdout
        await client.delete(box.id)
        return state

def load_environment():
    assert vf.SandboxEnv is SandboxEnv
    return Direct(dataset=[{"question": "q", "answer": "a"}])
"""


@needs_isolation
def test_an_environment_that_calls_the_client_runs_as_it_is(tmp_path, monkeypatch):
    folder = tmp_path / "direct_toy"
    folder.mkdir()
    (folder / "direct_toy.py").write_text(DIRECT)
    (folder / "pyproject.toml").write_text('[project]\nname = "direct-toy"\nversion = "1.0"\n')
    code = (
        "import asyncio, mettle.envs as vf\n"
        "env = vf.load_environment('direct-toy')\n"
        "state = asyncio.run(env.rollout(env.get_dataset()[0] | {'prompt': []}, None, 'm'))\n"
        "print(state['said'], state['error'])"
    )
    monkeypatch.setenv("METTLE_ENVIRONMENTS", str(tmp_path))
    assert run_python(code).startswith("from a sandbox\n")


LEAVING = """
import asyncio, os, sys
from mettle.envs.sandboxes import AsyncSandboxClient, CreateSandboxRequest
from mettle.envs.sandboxes.shared import shared_machines
async def main():
    client = AsyncSandboxClient()
    box = await client.create(CreateSandboxRequest(name="left"))
    await client.start_background_job(box.id, "sleep 300")
    [pool] = shared_machines().pools.started
    print(pool.template_pid)
asyncio.run(main())
if sys.argv[1:] == ["abruptly"]:
    sys.stdout.flush(); os._exit(1)
"""


@needs_isolation
@pytest.mark.parametrize("how", ["abruptly", "normally"])
def test_a_process_that_ends_takes_its_sandboxes_along(how):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])}
    done = subprocess.run(
        [sys.executable, "-c", LEAVING, how], capture_output=True, text=True, timeout=300, env=env, check=False
    )
    assert done.stderr == ""
    template = int(done.stdout)
    for _ in range(100):
        if not Path(f"/proc/{template}").exists():
            return
        subprocess.run(["sleep", "0.02"], check=True)
    pytest.fail("the template lives on")
