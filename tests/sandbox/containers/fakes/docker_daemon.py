"""A Docker daemon as the Engine API describes it, as far as the backend speaks to it.

Written from the public reference (versions 1.41 to 1.43): paths, fields, status codes and words of errors, the stream of
a pull, and the framing of attached streams. It is stricter than the real one: a field that it does not know is an error,
and so is a protection that was not asked for. Containers are processes in namespaces that run the real agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import secrets
import shutil
import struct
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from aiohttp import web

from fakes import processes
from fakes.faults import Faults, hang_up

API = "1.43"
FIELDS = {
    "Image", "Hostname", "User", "WorkingDir", "Entrypoint", "Cmd", "Env", "Labels", "Tty", "OpenStdin", "StdinOnce",
    "AttachStdin", "AttachStdout", "AttachStderr", "NetworkDisabled", "Healthcheck", "StopTimeout", "HostConfig",
}  # fmt: skip
HOST_FIELDS = {
    "ReadonlyRootfs", "Tmpfs", "Mounts", "ShmSize", "CapDrop", "SecurityOpt", "Privileged", "NetworkMode", "IpcMode",
    "Memory", "MemorySwap", "NanoCpus", "PidsLimit", "OomScoreAdj", "Ulimits", "LogConfig", "RestartPolicy",
    "AutoRemove", "Init", "Runtime",
}  # fmt: skip


class Problem(Exception):
    """An answer with a status and words."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Container:
    """One, from its creation to its removal."""

    def __init__(self, name: str, body: dict[str, Any], image: dict[str, Any]) -> None:
        self.id = secrets.token_hex(32)
        self.name = name
        self.body = body
        self.image = image
        self.created = time.time()
        self.status = "created"
        self.exit_code = 0
        self.is_out_of_memory = False
        self.process: asyncio.subprocess.Process | None = None
        self.attached: list[web.StreamResponse] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.waiting_input: list[bytes] = []

    @property
    def labels(self) -> dict[str, str]:
        found: dict[str, str] = self.body.get("Labels") or {}
        return found


class FakeDocker:
    """The daemon. `url` is its address; `registry` is what can be pulled."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fake-docker-"))
        self.folder.chmod(0o755)
        self.path = self.folder / "docker.sock"
        self.faults = Faults()
        self.containers: dict[str, Container] = {}
        self.volumes: dict[str, Path] = {}
        self.images: dict[str, dict[str, Any]] = {}
        self.registry = {"python:3.12-slim"}
        self.runtimes: dict[str, dict[str, str]] = {"runc": {"path": "runc"}}
        self.gives_seccomp = True
        self.is_podman = False
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    @property
    def running(self) -> list[Container]:
        return [container for container in self.containers.values() if container.status == "running"]

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        app = web.Application(middlewares=[self._middleware])
        app.router.add_route("*", "/{tail:.*}", self._dispatch)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self.path)).start()

    async def stop(self) -> None:
        """The daemon ends, and with it its containers, as without live restore."""
        for container in self.running:
            await self._end(container)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    async def close(self) -> None:
        await self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    async def end_for_memory(self, container: Container) -> None:
        """What the kernel does to a container over its limit."""
        container.is_out_of_memory = True
        await self._end(container)

    def _middleware_answer(self, status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
        return web.json_response({"message": message}, status=status, headers=headers)

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Any) -> web.StreamResponse:
        fault = self.faults.next(request)
        if fault is not None and not fault.is_after:
            return (
                hang_up(request)
                if not fault.status
                else self._middleware_answer(fault.status, fault.message, fault.headers)
            )
        try:
            answer: web.StreamResponse = await handler(request)
        except Problem as problem:
            answer = self._middleware_answer(problem.status, str(problem))
        return hang_up(request) if fault is not None else answer

    async def _dispatch(self, request: web.Request) -> web.StreamResponse:
        words = request.path.strip("/").split("/")
        if words[0].startswith("v1."):
            words = words[1:]
        match request.method, words:
            case "GET", ["version"]:
                parts = [{"Name": "Podman Engine" if self.is_podman else "Engine"}]
                return web.json_response({"Version": "25.0.0", "ApiVersion": API, "Components": parts})
            case "GET", ["info"]:
                return web.json_response({"Runtimes": self.runtimes, "DefaultRuntime": "runc"})
            case "POST", ["volumes", "create"]:
                return await self._create_volume(request)
            case "POST", ["images", "create"]:
                return await self._pull(request)
            case "GET", ["images", *name, "json"]:
                return web.json_response(self._image("/".join(name)))
            case "GET", ["containers", "json"]:
                return self._list(request)
            case "POST", ["containers", "create"]:
                return await self._create(request)
            case method, ["containers", container_id, *rest]:
                return await self._about(request, method, self._find(container_id), rest)
        raise Problem(404, "page not found")

    async def _about(
        self, request: web.Request, method: str, container: Container, rest: list[str]
    ) -> web.StreamResponse:
        match method, rest:
            case "GET", ["json"]:
                return self._inspect(container)
            case "PUT", ["archive"]:
                return await self._put_archive(request, container)
            case "GET", ["archive"]:
                return self._get_archive(request, container)
            case "POST", ["attach"]:
                return await self._attach(request, container)
            case "POST", ["start"]:
                return await self._start(container)
            case "DELETE", []:
                return await self._remove(request, container)
        raise Problem(404, "page not found")

    def _find(self, key: str) -> Container:
        for container in self.containers.values():
            if key in (container.id, container.name) or (len(key) >= 12 and container.id.startswith(key)):
                return container
        raise Problem(404, f"No such container: {key}")

    def _image(self, name: str) -> dict[str, Any]:
        for image in self.images.values():
            if name in (*image["RepoTags"], image["Id"]):
                return image
        raise Problem(404, f"No such image: {name}")

    async def _create_volume(self, request: web.Request) -> web.Response:
        body = await request.json()
        if unknown := set(body) - {"Name", "Labels", "Driver", "DriverOpts"}:
            raise Problem(400, f"unknown fields {unknown}")
        if body["Name"] not in self.volumes:
            made = self.volumes[body["Name"]] = self.folder / body["Name"]
            made.mkdir(mode=0o755)
        return web.json_response({"Name": body["Name"], "Driver": "local"}, status=201)

    async def _pull(self, request: web.Request) -> web.StreamResponse:
        """A stream of JSON, cut where it happens to be cut; what goes wrong comes after the status."""
        name = request.query["fromImage"]
        if "tag" in request.query:
            name = f"{name}:{request.query['tag']}"
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        told: list[dict[str, Any]] = [{"status": f"Pulling from {name}", "id": "latest"}]
        if name in self.registry:
            for current in (1, 50, 100):
                detail = {"current": current << 20, "total": 100 << 20}
                told.append({"status": "Downloading", "progressDetail": detail, "id": "a1b2"})
            told.append({"status": "Status: Downloaded newer image"})
            digest = f"sha256:{secrets.token_hex(32)}"
            self.images[name] = {
                **{"Id": digest, "RepoTags": [name], "RepoDigests": [f"{name.split(':')[0]}@{digest}"]},
                "Config": {"Env": [f"PATH={processes.IMAGE_PATH}", "FROM_IMAGE=yes"]},
            }
        else:
            words = f"manifest for {name} not found: manifest unknown"
            told.append({"errorDetail": {"message": words}, "error": words})
        data = "".join(json.dumps(line) + "\r\n" for line in told).encode()
        for start in range(0, len(data), 37):
            await answer.write(data[start : start + 37])
        await answer.write_eof()
        return answer

    def _list(self, request: web.Request) -> web.Response:
        wanted = dict(text.split("=", 1) for text in json.loads(request.query["filters"])["label"])
        shown = [
            {
                **{"Id": container.id, "Names": [f"/{container.name}"], "State": container.status},
                **{"Labels": container.labels, "Created": int(container.created), "Image": container.body["Image"]},
            }
            for container in self.containers.values()
            if wanted.items() <= container.labels.items()
            and (request.query.get("all") == "1" or container.status == "running")
        ]
        return web.json_response(shown)

    async def _create(self, request: web.Request) -> web.Response:
        body, name = await request.json(), request.query["name"]
        unknown = (set(body) - FIELDS) | (set(body["HostConfig"]) - HOST_FIELDS)
        if unknown:
            raise Problem(400, f"unknown fields {sorted(unknown)}")
        image = self._image(body["Image"])
        for other in self.containers.values():
            if other.name == name:
                words = f'The container name "/{name}" is already in use by container "{other.id}".'
                raise Problem(409, f"Conflict. {words}")
        runtime = body["HostConfig"].get("Runtime")
        if runtime and runtime not in self.runtimes:
            raise Problem(400, f"unknown or invalid runtime name: {runtime}")
        made = Container(name, body, image)
        self.containers[made.id] = made
        return web.json_response({"Id": made.id, "Warnings": []}, status=201)

    def _inspect(self, container: Container) -> web.Response:
        state = {
            **{"Status": container.status, "Running": container.status == "running"},
            **{"OOMKilled": container.is_out_of_memory, "ExitCode": container.exit_code, "Error": ""},
        }
        return web.json_response(
            {
                **{"Id": container.id, "Name": f"/{container.name}", "State": state, "Image": container.image["Id"]},
                "Config": {"Tty": container.body.get("Tty", False)},
            }
        )

    def _volume_at(self, container: Container, path: str) -> tuple[Path, bool, str]:
        for mount in container.body["HostConfig"].get("Mounts", ()):
            if path == mount["Target"] or path.startswith(f"{mount['Target']}/"):
                return self.volumes[mount["Source"]], mount["ReadOnly"], path[len(mount["Target"]) :].strip("/")
        raise Problem(404, f"Could not find the file {path} in container {container.id}")

    async def _put_archive(self, request: web.Request, container: Container) -> web.Response:
        volume, is_read_only, inner = self._volume_at(container, request.query["path"])
        if is_read_only or container.body["HostConfig"].get("ReadonlyRootfs"):
            raise Problem(403, "container rootfs is marked read-only")
        with tarfile.open(fileobj=io.BytesIO(await request.read())) as archive:
            archive.extractall(volume / inner, filter="data")
        return web.Response(text="")

    def _get_archive(self, request: web.Request, container: Container) -> web.Response:
        volume, _, inner = self._volume_at(container, request.query["path"])
        if not (volume / inner).exists():
            raise Problem(404, f"Could not find the file {request.query['path']} in container {container.id}")
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(volume / inner, inner)
        return web.Response(body=packed.getvalue(), content_type="application/x-tar")

    async def _start(self, container: Container) -> web.Response:
        if container.status == "running":
            return web.Response(status=304)
        container.process = await processes.start(self._spec(container), has_streams=True)
        container.status = "running"
        container.tasks = [
            asyncio.create_task(self._carry_out(container, 1, container.process.stdout)),
            asyncio.create_task(self._carry_out(container, 2, container.process.stderr)),
        ]
        container.tasks.append(asyncio.create_task(self._wait(container)))
        for data in container.waiting_input:
            assert container.process.stdin is not None
            container.process.stdin.write(data)
        return web.Response(status=204)

    def _spec(self, container: Container) -> dict[str, Any]:
        body, host = container.body, container.body["HostConfig"]
        sizes = {
            path: dict(o.partition("=")[::2] for o in text.split(","))["size"] for path, text in host["Tmpfs"].items()
        }
        environment = dict(text.split("=", 1) for text in [*container.image["Config"]["Env"], *body["Env"]])
        is_confined = self.gives_seccomp and "seccomp=unconfined" not in host["SecurityOpt"]
        return {
            "argv": [*body["Entrypoint"], *body["Cmd"]],
            "env": {"HOSTNAME": body["Hostname"], **environment},
            "uid": int(body["User"].partition(":")[0]),
            "mounts": {mount["Target"]: str(self.volumes[mount["Source"]]) for mount in host["Mounts"]},
            "tmpfs": {path: int(size) for path, size in sizes.items()},
            "read_only": host["ReadonlyRootfs"],
            "network": host["NetworkMode"] == "none",
            "capabilities": host["CapDrop"] != ["ALL"] or "no-new-privileges:true" not in host["SecurityOpt"],
            "seccomp": is_confined,
            "processes": host["PidsLimit"],
        }

    async def _attach(self, request: web.Request, container: Container) -> web.StreamResponse:
        """Hijack: what the client sends is standard input, what the process writes comes in pieces with a head."""
        answer = web.StreamResponse(
            status=101,
            reason="UPGRADED",
            headers={
                "Content-Type": "application/vnd.docker.raw-stream",
                "Connection": "Upgrade",
                "Upgrade": "tcp",
            },
        )
        arrived: asyncio.Queue[bytes] = asyncio.Queue()
        await answer.prepare(request)
        request.protocol.set_parser(_Raw(arrived))
        container.attached.append(answer)
        try:
            while data := await arrived.get():
                if container.process is None:
                    container.waiting_input.append(data)
                    continue
                assert container.process.stdin is not None
                container.process.stdin.write(data)
                with contextlib.suppress(ConnectionError):
                    await container.process.stdin.drain()
        finally:
            if answer in container.attached:
                container.attached.remove(answer)
            if container.body["StdinOnce"] and container.process is not None and container.process.stdin is not None:
                container.process.stdin.close()
        return answer

    async def _carry_out(self, container: Container, stream: int, source: asyncio.StreamReader | None) -> None:
        assert source is not None
        while data := await source.read(1 << 15):
            for answer in list(container.attached):
                for start in range(0, len(data), 10_000):
                    piece = data[start : start + 10_000]
                    with contextlib.suppress(ConnectionError):
                        await answer.write(struct.pack(">BxxxI", stream, len(piece)))
                        await answer.write(piece)

    async def _wait(self, container: Container) -> None:
        assert container.process is not None
        container.exit_code = await container.process.wait()
        if container.exit_code < 0:
            container.exit_code = 128 - container.exit_code
        container.status = "exited"
        await asyncio.wait(container.tasks[:2])
        for answer in container.attached:
            if answer._req is not None and answer._req.transport is not None:
                answer._req.transport.close()

    async def _end(self, container: Container) -> None:
        if container.process is not None:
            await processes.kill(container.process)
            await asyncio.wait(container.tasks)

    async def _remove(self, request: web.Request, container: Container) -> web.Response:
        if container.status == "running" and request.query.get("force") != "1":
            raise Problem(409, "cannot remove a running container")
        if container.status == "removing":
            raise Problem(409, f"removal of container {container.id} is already in progress")
        is_running, container.status = container.status == "running", "removing"
        if is_running:
            await self._end(container)
        self.containers.pop(container.id, None)
        return web.Response(status=204)


class _Raw:
    """Bytes of a hijacked connection, as they come; an empty piece is the end."""

    def __init__(self, arrived: asyncio.Queue[bytes]) -> None:
        self._arrived = arrived

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        self._arrived.put_nowait(bytes(data))
        return False, b""

    def feed_eof(self) -> None:
        self._arrived.put_nowait(b"")

    def set_exception(self, error: BaseException, *_: object) -> None:
        self._arrived.put_nowait(b"")


def num_processes_of(folder: Path) -> int:
    """How many processes run whose command line names the folder: the fake's containers."""
    found = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                found += str(folder).encode() in Path(f"/proc/{name}/cmdline").read_bytes()
    return found
