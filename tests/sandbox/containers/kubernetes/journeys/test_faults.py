"""What goes wrong between owners and a cluster, and what must be true afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import pytest
import pytest_asyncio
from fakes.kubernetes_api import TOKEN, FakeKubernetes

from mettle.errors import UserError
from mettle.sandbox import MachineConfig, MachineLost, SandboxConfig, open_machines
from mettle.sandbox.containers import link as link_module
from mettle.sandbox.containers.errors import (
    ControlPlaneAway,
    ControlPlaneError,
    ImageMissing,
    MachineEvicted,
    MachineOutOfMemory,
    MachineRemoved,
    NodeLost,
)
from mettle.sandbox.containers.grading import Surroundings, examine
from mettle.sandbox.containers.kubernetes import pod as pod_module
from mettle.sandbox.containers.kubernetes.access import Access
from mettle.sandbox.containers.kubernetes.bodies import STATE, TAKEN, WARM, identity_of
from mettle.sandbox.containers.kubernetes.client import KubernetesClient
from mettle.sandbox.containers.kubernetes.config import KubernetesConfig
from mettle.sandbox.containers.kubernetes.host import KubernetesHost
from mettle.sandbox.containers.kubernetes.identity import SecureStream, make_identity
from mettle.sandbox.containers.machine import ContainerMachine
from mettle.sandbox.containers.pool import ContainerPool

pytestmark = [pytest.mark.usefixtures("_needs_isolation"), pytest.mark.asyncio]

EXEC_API = "client.authentication.k8s.io/v1"


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[FakeKubernetes]:
    async with FakeKubernetes() as fake:
        yield fake


@pytest.fixture
def _slow_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy host it is seconds until a cluster has told what became of a pod."""
    for module in (pod_module, link_module):
        monkeypatch.setattr(module, "_OUTCOME_S", 100.0)


def config_for(cluster: FakeKubernetes, require: str = "ns", **kubernetes: object) -> SandboxConfig:
    settings = {"kubeconfig": cluster.kubeconfig(), "warm": 0, "patience_s": 5.0, **kubernetes}
    own = KubernetesConfig(**settings)  # type: ignore[arg-type]
    return SandboxConfig(backend="kubernetes", kubernetes=own, require=require)  # type: ignore[arg-type]


def pods_in(cluster: FakeKubernetes, state: str) -> list[str]:
    return [
        name
        for name, pod in cluster.pods.items()
        if pod["metadata"]["labels"][STATE] == state and pod["status"]["phase"] == "Running"
    ]


async def until_warm(cluster: FakeKubernetes, num: int) -> list[str]:
    async with asyncio.timeout(100):
        while len(found := pods_in(cluster, WARM)) != num:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return found


def pod_of(machine: object) -> str:
    assert isinstance(machine, ContainerMachine)
    return machine.container.id


async def test_two_owners_that_want_one_warm_pod_get_two_pods(cluster: FakeKubernetes) -> None:
    """Both have seen the same version of it; the server gives it to one of them."""
    async with (
        open_machines(config_for(cluster, warm=1)) as first,
        open_machines(config_for(cluster)) as second,
    ):
        [waiting] = await until_warm(cluster, 1)
        host = second.host  # type: ignore[attr-defined]
        await host._pods.wait(lambda: any(waiting == pod["metadata"]["name"] for pod in host._pods.all()), 5)
        cluster.faults.requests.clear()
        made = await asyncio.gather(first.create(), second.create())
        names = [pod_of(machine) for machine in made]
        assert len(set(names)) == 2
        assert waiting in names
        assert cluster.faults.num(f"PATCH .*/pods/{waiting}") == 2
        assert [(await machine.exec("echo mine")).stdout for machine in made] == ["mine\n", "mine\n"]
    assert not cluster.pods
    assert not cluster.objects["leases"]


async def test_an_adopted_pod_outlives_the_owner_that_made_it(cluster: FakeKubernetes) -> None:
    async with open_machines(config_for(cluster)) as second:
        async with open_machines(config_for(cluster, warm=1)):
            [waiting] = await until_warm(cluster, 1)
            machine = await second.create()
            assert pod_of(machine) == waiting
            lease = cluster.pods[waiting]["metadata"]["ownerReferences"][0]["name"]
            await until_warm(cluster, 1)
        assert list(cluster.pods) == [waiting]
        assert list(cluster.objects["leases"]) == [lease]
        assert (await machine.exec("echo here")).stdout == "here\n"


async def test_a_pod_is_adopted_with_the_life_that_it_needs_and_no_more(cluster: FakeKubernetes) -> None:
    async with open_machines(config_for(cluster, warm=1, max_lifetime_s=5000)) as machines:
        [waiting] = await until_warm(cluster, 1)
        long = await machines.create(MachineConfig(lifetime_s=20_000))
        assert pod_of(long) != waiting
        short = await machines.create(MachineConfig(lifetime_s=100))
        assert pod_of(short) == waiting
        assert cluster.pods[waiting]["spec"]["activeDeadlineSeconds"] < 1000


@pytest.mark.usefixtures("_slow_cluster")
async def test_a_watch_that_has_expired_begins_anew_and_one_that_was_cut_off_goes_on(cluster: FakeKubernetes) -> None:
    async with open_machines(config_for(cluster)) as machines:
        pods = machines.host._pods  # type: ignore[attr-defined]
        machine = await machines.create()
        num_lists = pods.num_lists
        cluster.end_watches()
        assert (await (await machines.create()).exec("echo on")).stdout == "on\n"
        assert pods.num_lists == num_lists
        running = asyncio.create_task(machine.exec("sleep 60", timeout_s=60))
        await asyncio.sleep(0.2)
        cluster.faults.plan("GET", "/pods$", 0, times=2)  # while nobody can watch, a pod is evicted and forgotten
        cluster.end_watches()
        await cluster.node.evict(pod_of(machine))
        cluster.forget_history()
        with pytest.raises(MachineEvicted, match="low on memory"):
            await running
        async with asyncio.timeout(60):
            while pods.num_lists == num_lists:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert (await (await machines.create()).exec("echo anew")).stdout == "anew\n"


@pytest.mark.usefixtures("_slow_cluster")
async def test_what_became_of_a_pod_has_a_type(cluster: FakeKubernetes) -> None:
    async with open_machines(config_for(cluster)) as machines:
        ends: list[tuple[Any, type[MachineLost], str]] = [
            (cluster.node.end_for_memory, MachineOutOfMemory, "lack of memory"),
            (cluster.node.evict, MachineEvicted, "low on memory"),
            (cluster.node.kill_agent, MachineLost, "its pod ended with status"),
            (lambda name: cluster.remove("pods", cluster.pods[name]), MachineRemoved, "removed by somebody else"),
        ]
        for end, kind, words in ends:
            machine = await machines.create()
            running = asyncio.create_task(machine.exec("sleep 60", timeout_s=60))
            await asyncio.sleep(0.2)
            await end(pod_of(machine))
            with pytest.raises(kind, match=words):
                await running
            with pytest.raises(kind, match=words):
                await machine.exec("true")
            await machine.delete()


async def test_a_lost_node_is_noticed_though_the_network_says_nothing(cluster: FakeKubernetes) -> None:
    async with open_machines(config_for(cluster)) as machines:
        machine = await machines.create()
        running = asyncio.create_task(machine.exec("sleep 1000", timeout_s=1000))
        await asyncio.sleep(0.2)
        await cluster.node.lose(pod_of(machine))
        with pytest.raises(NodeLost, match="DeletionByTaintManager"):
            await running


async def test_a_busy_server_is_waited_for_as_long_as_it_says(cluster: FakeKubernetes) -> None:
    async with open_machines(config_for(cluster)) as machines:
        cluster.faults.plan("POST", "/pods$", 429, headers={"Retry-After": "1"})
        started = time.monotonic()
        await machines.create()
        assert time.monotonic() - started >= 1.0
        cluster.faults.plan("POST", "/pods$", 429, headers={"Retry-After": "60"})
        with pytest.raises(ControlPlaneError, match="429"):
            await machines.create()
        cluster.faults.plan("POST", "/pods$", 403, "exceeded quota: machines")
        with pytest.raises(ControlPlaneError, match="exceeded quota: machines"):
            await machines.create()


async def test_a_pod_whose_making_was_not_answered_is_found(cluster: FakeKubernetes) -> None:
    async with open_machines(config_for(cluster)) as machines:
        cluster.faults.plan("POST", "/pods$", 0, is_after=True)
        assert (await (await machines.create()).exec("echo one")).stdout == "one\n"
        assert len(cluster.pods) == 1
        cluster.faults.plan("POST", "/pods$", 0)
        await machines.create()
        assert len(cluster.pods) == 2


async def test_pods_that_cannot_start_say_why_and_are_removed(cluster: FakeKubernetes) -> None:
    async with open_machines(config_for(cluster, start_timeout_s=5.0)) as machines:
        with pytest.raises(ImageMissing, match=r"'no/such:image' cannot be pulled"):
            await machines.create(MachineConfig(image="no/such:image"))
        cluster.node.is_schedulable = False
        with pytest.raises(ControlPlaneAway, match=r"within 5 s: it is not scheduled: .*Insufficient memory"):
            await machines.create()
        assert not cluster.pods


async def test_the_pods_of_an_owner_that_gives_no_sign_are_removed_by_another(cluster: FakeKubernetes) -> None:
    lost = KubernetesHost(config_for(cluster, warm=1).kubernetes)
    await lost.open()
    await until_warm(cluster, 1)
    machine = await lost.make(lost.shape_of(MachineConfig()), MachineConfig())
    assert len(pods_in(cluster, TAKEN)) == 1
    for task in (lost._filler, lost._lease._keeper, lost._pods._watcher):  # as if it were killed
        assert task is not None
        task.cancel()
    [lease] = cluster.objects["leases"].values()
    async with open_machines(config_for(cluster)):
        assert pods_in(cluster, TAKEN)  # it has given a sign a moment ago
    lease["spec"]["renewTime"] = "2026-01-01T00:00:00.000000Z"
    async with open_machines(config_for(cluster)):
        assert not cluster.pods
        assert len(cluster.objects["leases"]) == 1
    await machine.link.close()
    await lost._client.close()


async def test_a_lease_that_was_renewed_meanwhile_is_not_removed(cluster: FakeKubernetes) -> None:
    async with open_machines(config_for(cluster)) as machines:
        lease = machines.host._lease  # type: ignore[attr-defined]
        [own] = cluster.objects["leases"].values()
        stale = json.loads(json.dumps(own["metadata"]))
        await lease._renew()
        seen = {"uid": stale["uid"], "resourceVersion": stale["resourceVersion"]}
        assert not await lease._remove(stale["name"], seen)
        assert cluster.objects["leases"]


ASKING = b"\0\0\0\0\1\0\0\0\x2cGET /api/v1/status HTTP/1.1\r\nHost: agent\r\n\r\n"


async def said_to(address: str, identity: str) -> bytes:
    """What an agent says to somebody with this certificate: nothing, or a closed door."""
    try:
        stream = await SecureStream.connect(address, 8790, identity, 2)
    except OSError:
        return b""
    try:
        stream.write(ASKING)
        return await stream.read()
    except OSError:
        return b""
    finally:
        await stream.close()


class Impostor(SecureStream):
    """Takes any agent, and shows a certificate of its own."""

    @classmethod
    async def connect(cls, host: str, port: int, identity: str, timeout_s: float) -> Self:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if identity:
            with tempfile.NamedTemporaryFile("w") as file:
                file.write(identity)
                file.flush()
                context.load_cert_chain(file.name)
        async with asyncio.timeout(timeout_s):
            made = cls(*await asyncio.open_connection(host, port, ssl=context))
        made.write(ASKING)
        return made


async def test_whoever_does_not_hold_the_key_gets_nowhere_near_the_agent(cluster: FakeKubernetes) -> None:
    host = KubernetesHost(config_for(cluster, warm=1).kubernetes)
    await host.open()
    try:
        [waiting] = await until_warm(cluster, 1)
        pod = cluster.pods[waiting]
        address = pod["status"]["podIP"]
        reader, writer = await asyncio.open_connection(address, 8790)
        writer.write(b"GET / HTTP/1.1\r\nHost: it\r\n\r\n" + b"x" * 200)
        with contextlib.suppress(ConnectionResetError):
            assert len(await reader.read()) <= 32  # an alert of TLS, and the end
        writer.close()
        assert not await said_to(address, make_identity())
        for shown in ("", make_identity()):
            with contextlib.suppress(OSError):
                impostor = await Impostor.connect(address, 8790, shown, 2)
                assert not await impostor.read()
        container = await host.make(host.shape_of(MachineConfig()), MachineConfig())
        assert container.id == waiting
        async with asyncio.timeout(100):
            while not (other := [name for name in pods_in(cluster, WARM) if name != waiting]):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        next_pod = cluster.pods[other[0]]
        async with asyncio.timeout(100):
            while not (said := await said_to(next_pod["status"]["podIP"], identity_of(next_pod))):  # noqa: ASYNC110
                await asyncio.sleep(0.02)  # it starts
        assert b"200" in said
        assert not await said_to(address, identity_of(pod))  # it has an owner already
        await container.remove()
    finally:
        await host.close()


async def test_who_stands_in_for_an_agent_is_not_believed(cluster: FakeKubernetes) -> None:
    """Another pod, or the network, answers at the address: the certificate is not the one that the pod was given."""
    real, other = make_identity(), make_identity()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(other)
        file.flush()
        context.load_cert_chain(file.name)
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ssl.SSLCertVerificationError):
            await SecureStream.connect("127.0.0.1", port, real, 2)


async def test_a_cancelled_creation_leaves_no_pod(cluster: FakeKubernetes) -> None:
    async with open_machines(config_for(cluster)) as machines:
        for pause_s in (0.0, 0.002, 0.01, 0.05, 0.1):
            task = asyncio.create_task(machines.create())
            await asyncio.sleep(pause_s)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not cluster.pods


async def test_a_name_that_a_removed_pod_had_is_as_good_as_another(
    cluster: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_machines(config_for(cluster)) as machines:
        monkeypatch.setattr("fakes.kubernetes_api.secrets.token_hex", lambda _: "again")
        for _ in range(2):
            machine = await machines.create()
            assert pod_of(machine) == "mettle-again"
            await machine.delete()
            pods = machines.host._pods  # type: ignore[attr-defined]
            assert await pods.wait(lambda pods=pods: pods.is_gone("mettle-again"), 60)


async def test_pods_are_restricted_and_lonely(cluster: FakeKubernetes) -> None:
    cluster.runtime_classes.add("gvisor")
    async with open_machines(config_for(cluster)) as machines:
        await machines.create(MachineConfig(memory_mb=100, disk_mb=50, cpus=2))
        [pod] = cluster.pods.values()
        spec = pod["spec"]
        assert spec["runtimeClassName"] == "gvisor"
        assert spec["automountServiceAccountToken"] is False
        assert (spec["restartPolicy"], spec["dnsPolicy"]) == ("Never", "None")
        assert spec["containers"][0]["resources"]["limits"] == {"cpu": "2000m", "memory": "278Mi"}
        [policy] = cluster.objects["networkpolicies"].values()
        assert policy["spec"]["egress"] == []
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        assert pod["metadata"]["ownerReferences"][0]["kind"] == "Lease"


@pytest.mark.parametrize(
    ("own_limit", "pids", "unlimited"),
    [(-1, "", "NPROC"), (96365, "max", "NPROC"), (96365, "128", ""), (128, "", "")],
)
async def test_nodes_that_do_not_limit_processes_are_found_out(own_limit: int, pids: str, unlimited: str) -> None:
    doors = {"processes": [1, 2, 3], "writable": [], "privileges": [], "unlimited": ["NPROC"], "calls": []}
    place = {
        **{"processes": own_limit, "cgroup": {"memory": "1000", "pids": pids, "cpu": "1000"}, "interfaces": ["lo"]},
        **{
            "reached": [],
            "kernel": "6.1",
            "machine": "x86_64",
            "is_gvisor": False,
            "user_map": ["0", "0", "4294967295"],
        },
        "status": {"Uid": "1000 1000 1000 1000", "NoNewPrivs": "1", "Seccomp": "2", "CapEff": "0"},
    }
    around = Surroundings("a cluster", fixes=(("resource limits", "set podPidsLimit"),))
    report = examine(SandboxConfig(backend="kubernetes"), doors, place, around)
    limits = report.layer("resource-limits")
    assert (report.grade, limits.is_in_force) == (("none", False) if unlimited else ("ns", True))
    assert unlimited in limits.detail
    assert limits.fix == ("set podPidsLimit" if unlimited else "")


async def test_a_machine_reaches_what_it_is_allowed_to_and_nothing_else(cluster: FakeKubernetes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\nyes")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, open_machines(config_for(cluster)) as machines:
        machine = await machines.create(MachineConfig(network={"allow": [f"127.0.0.1:{port}"]}))
        code = f"import urllib.request as r; print(r.urlopen('http://127.0.0.1:{port}/').read())"
        found = await machine.exec(["python3", "-c", code], env={"no_proxy": ""})
        assert found.stdout == "b'yes'\n", found.stderr
        other = await machine.exec(["python3", "-c", code.replace(f"{port}/", "1/")], env={"no_proxy": ""})
        assert other.exit_code == 1


async def test_a_token_that_was_refused_is_read_again(cluster: FakeKubernetes, tmp_path: Path) -> None:
    told = json.loads(cluster.kubeconfig().read_text())
    (tmp_path / "token").write_text("an-old-one")
    told["users"][0]["user"] = {"tokenFile": "token"}
    path = tmp_path / "config"
    path.write_text(json.dumps(told))
    host = KubernetesHost(KubernetesConfig(kubeconfig=path, warm=0))
    with pytest.raises(ControlPlaneError, match="401"):
        await host.open()
    (tmp_path / "token").write_text(TOKEN)
    await host.open()
    await host.close()


async def test_a_program_of_the_kubeconfig_gives_the_token(cluster: FakeKubernetes, tmp_path: Path) -> None:
    told = json.loads(cluster.kubeconfig().read_text())
    credential = {"apiVersion": EXEC_API, "kind": "ExecCredential", "status": {"token": TOKEN}}
    command = {"apiVersion": EXEC_API, "command": "echo", "args": [json.dumps(credential)]}
    told["users"][0]["user"] = {"exec": command}
    path = tmp_path / "config"
    path.write_text(json.dumps(told))
    async with ContainerPool(config_for(cluster, kubeconfig=path), KubernetesHost(KubernetesConfig(kubeconfig=path))):
        assert cluster.objects["leases"]


async def test_a_program_whose_token_was_refused_is_asked_again(cluster: FakeKubernetes, tmp_path: Path) -> None:
    told = json.loads(cluster.kubeconfig().read_text())
    credential: dict[str, Any] = {"apiVersion": EXEC_API, "kind": "ExecCredential", "status": {"token": "an-old-one"}}
    held = tmp_path / "credential"
    held.write_text(json.dumps(credential))
    command = {"apiVersion": EXEC_API, "command": "cat", "args": [str(held)]}
    told["users"][0]["user"] = {"exec": command}
    path = tmp_path / "config"
    path.write_text(json.dumps(told))
    client = KubernetesClient(KubernetesConfig(kubeconfig=path))
    with pytest.raises(ControlPlaneError, match="401"):
        await client.open()
    credential["status"] = {"token": TOKEN}
    held.write_text(json.dumps(credential))
    assert (await client.send("GET", "/version"))["gitVersion"] == "v1.31.0"
    await client.close()


async def test_a_cluster_that_cannot_be_found_is_one_clear_error(cluster: FakeKubernetes, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.json cannot be read, .*sandbox\.kubernetes\.kubeconfig"):
        await Access.open(KubernetesConfig(kubeconfig=tmp_path / "none.json"), {})
    with pytest.raises(UserError, match=r"no usable kubeconfig: .*there"):
        await Access.open(KubernetesConfig(kubeconfig=cluster.kubeconfig(), context="there"), {})
    with pytest.raises(UserError, match=r"service account: .*sandbox\.kubernetes\.kubeconfig"):
        await Access.open(KubernetesConfig(), {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"})
    path = tmp_path / "config.yaml"
    for text in ("a: [", "- a", "", "current-context: a"):
        path.write_text(text)
        with pytest.raises(UserError, match="no usable kubeconfig"):
            await Access.open(KubernetesConfig(kubeconfig=path), {})
    path.write_text(
        "current-context: a\ncontexts: [{name: a, context: {cluster: c, user: u, namespace: n}}]\n"
        "clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1/'}}]\nusers: [{name: u, user: {token: t}}]\n"
    )
    found = await Access.open(KubernetesConfig(kubeconfig=path), {})
    assert (found.server, found.namespace) == ("http://127.0.0.1:1", "n")
    await found.close()
    with pytest.raises(ControlPlaneAway, match=r"no Kubernetes API answers at http://127\.0\.0\.1:1"):
        await KubernetesHost(KubernetesConfig(kubeconfig=path, patience_s=0.2)).open()
