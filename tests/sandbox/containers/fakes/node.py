"""The one node of the fake cluster: pods as processes, addresses for them, and everything that can befall them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import errno
import itertools
import os
import signal
from typing import TYPE_CHECKING, Any

from fakes import processes
from mettle.sandbox.zygote import watch

if TYPE_CHECKING:
    from fakes.kubernetes_api import FakeKubernetes


class Node:
    """Runs pods. Each has an address 127.77.x.y, where its network's port is carried to the pod's own."""

    def __init__(self, api: FakeKubernetes) -> None:
        self._api = api
        self._numbers = itertools.count(1)
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._networks: dict[str, asyncio.Server] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.images = {"python:3.12-slim"}
        self.max_processes = 128  # podPidsLimit of the kubelet; 0 is none
        self.gives_seccomp = True
        self.is_schedulable = True

    def run(self, pod: dict[str, Any]) -> None:
        name = pod["metadata"]["name"]
        self._tasks[name] = asyncio.create_task(self._run(name, pod), name=f"pod {name}")

    async def stop(self, name: str) -> None:
        """End a pod's processes, without a word in its status."""
        task = self._tasks.pop(name, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        process, network = self._processes.pop(name, None), self._networks.pop(name, None)
        if process is not None:
            await processes.kill(process)
        if network is not None:
            network.close()

    async def close(self) -> None:
        for name in list({*self._tasks, *self._processes}):
            await self.stop(name)

    async def end_for_memory(self, name: str) -> None:
        """What the kernel does to a container over its limit."""
        await self._end(name, {"phase": "Failed"}, {"exitCode": 137, "reason": "OOMKilled"})

    async def evict(self, name: str, reason: str = "TerminationByKubelet") -> None:
        """The kubelet needs room, or somebody drains the node."""
        condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "low on memory"}
        status = {"phase": "Failed", "reason": "Evicted", "message": "low on memory", "conditions": [condition]}
        await self._end(name, status, {"exitCode": 137, "reason": "Error"})

    async def lose(self, name: str) -> None:
        """The node is gone: nothing answers, and after a while the cluster removes what was on it.

        The network says nothing: its connections stay open and silent.
        """
        process = self._processes.get(name)
        if process is not None:
            self._freeze(process.pid)
        pod = copy.deepcopy(self._api.pods[name])
        reason = "DeletionByTaintManager"
        condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "node unreachable"}
        pod["status"]["conditions"] = [condition]
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        self._api.store("pods", "MODIFIED", pod)

    @staticmethod
    def _freeze(pid: int) -> None:
        """Stop a container and the network in front of it: connections stay, and nothing answers."""
        for number in (pid, *watch.descendants(pid)):
            os.kill(number, signal.SIGSTOP)

    async def kill_agent(self, name: str) -> None:
        """Process 1 of the pod ends."""
        await processes.kill(self._processes[name])

    def status(self, name: str, **changes: Any) -> None:
        pod = copy.deepcopy(self._api.pods[name])
        pod["status"] = {**pod["status"], **changes}
        self._api.store("pods", "MODIFIED", pod)

    async def _end(self, name: str, status: dict[str, Any], terminated: dict[str, Any]) -> None:
        task = self._tasks.pop(name)
        task.cancel()
        self.status(name, **status, containerStatuses=[{"name": "machine", "state": {"terminated": terminated}}])
        await self.stop(name)

    async def _run(self, name: str, pod: dict[str, Any]) -> None:
        if not self.is_schedulable:
            words = "0/1 nodes are available: 1 Insufficient memory."
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
            self.status(name, conditions=[condition])
            return
        image = pod["spec"]["containers"][0]["image"]
        if image not in self.images:
            for reason in ("ErrImagePull", "ImagePullBackOff"):
                waiting = {"reason": reason, "message": f"failed to pull {image}: not found"}
                self.status(name, containerStatuses=[{"image": image, "state": {"waiting": waiting}}])
            return
        address = await self._start(name, pod)
        started = {"name": "machine", "image": image, "imageID": f"{image}@sha256:1234", "state": {"running": {}}}
        from fakes.kubernetes_api import now

        self.status(name, phase="Running", podIP=address, startTime=now(), containerStatuses=[started])
        process = self._processes[name]
        assert process.stderr is not None
        words = (await process.stderr.read()).decode(errors="replace")[-2048:]
        code = await process.wait()
        how = {"exitCode": abs(code), "reason": "Error", "message": words if code else ""}  # FallbackToLogsOnError
        ended = {"name": "machine", "state": {"terminated": how}}
        if name in self._api.pods:
            self.status(name, phase="Failed" if code else "Succeeded", containerStatuses=[ended])

    async def _start(self, name: str, pod: dict[str, Any]) -> str:
        port = pod["spec"]["containers"][0]["ports"][0]["containerPort"]
        path = str(self._api.folder / f"{name}.sock")
        self._processes[name] = await processes.start(self._spec(pod, path), has_streams=False)

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                inner_reader, inner_writer = await asyncio.open_unix_connection(path)
            except OSError:
                writer.close()
                return
            async with asyncio.TaskGroup() as group:
                group.create_task(_pump(reader, inner_writer))
                group.create_task(_pump(inner_reader, writer))

        while True:
            number = next(self._numbers)
            address = f"127.77.{number >> 8}.{number & 255}"
            try:
                self._networks[name] = await asyncio.start_server(carry, address, port)
                return address
            except OSError as error:
                if error.errno != errno.EADDRINUSE:  # another cluster's pod, of this process or of another's
                    raise

    def _spec(self, pod: dict[str, Any], path: str) -> dict[str, Any]:
        spec = pod["spec"]
        [container] = spec["containers"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        mounts, tmpfs = {}, {}
        for mount in container["volumeMounts"]:
            volume = volumes[mount["name"]]
            if "configMap" in volume:
                mounts[mount["mountPath"]] = self._config_map(volume["configMap"]["name"])
            else:
                tmpfs[mount["mountPath"]] = int(volume["emptyDir"]["sizeLimit"].removesuffix("Mi")) << 20
        environment = {entry["name"]: entry["value"] for entry in container["env"]}
        return {
            "argv": container["command"],
            "env": {"PATH": processes.IMAGE_PATH, "FROM_IMAGE": "yes", **environment},
            "uid": spec["securityContext"]["runAsUser"],
            "mounts": mounts,
            "tmpfs": {at: size for at, size in tmpfs.items() if at != "/dev/shm"},
            "read_only": container["securityContext"]["readOnlyRootFilesystem"],
            "network": True,
            "capabilities": False,
            "seccomp": self.gives_seccomp,
            "processes": self.max_processes,
            "port": {"number": container["ports"][0]["containerPort"], "socket": path},
        }

    def _config_map(self, name: str) -> str:
        folder = self._api.folder / name
        folder.mkdir(mode=0o755, exist_ok=True)
        for key, data in self._api.objects["configmaps"][name]["binaryData"].items():
            if not (folder / key).exists():
                (folder / key).write_bytes(base64.b64decode(data))
        return str(folder)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()
