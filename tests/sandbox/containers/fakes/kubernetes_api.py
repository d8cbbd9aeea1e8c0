"""A Kubernetes API server with one node, as far as the backend speaks to it.

Written from the public API reference and "Kubernetes API concepts": paths, `Status` errors and their codes, lists in
pages, watches with bookmarks and their expiry (410), merge patches with a version to compare, deletion with
preconditions, removal by owner references. A field of a pod that it does not know is an error. Pods are processes in
namespaces that run the real agent; what the node knows of their limits it keeps, and nothing else is claimed.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from aiohttp import web

from fakes import node
from fakes.faults import Faults, hang_up

TOKEN = "a-token-of-the-fake"
NAMESPACE = "lab"
KINDS = {
    "pods": ("v1", "Pod"),
    "configmaps": ("v1", "ConfigMap"),
    "leases": ("coordination.k8s.io/v1", "Lease"),
    "networkpolicies": ("networking.k8s.io/v1", "NetworkPolicy"),
}
POD_FIELDS = {
    "restartPolicy", "activeDeadlineSeconds", "terminationGracePeriodSeconds", "automountServiceAccountToken",
    "enableServiceLinks", "hostname", "securityContext", "containers", "volumes", "dnsPolicy", "dnsConfig",
    "runtimeClassName", "nodeSelector", "tolerations", "imagePullSecrets",
}  # fmt: skip
CONTAINER_FIELDS = {
    "name", "image", "imagePullPolicy", "command", "workingDir", "env", "ports", "terminationMessagePolicy",
    "resources", "securityContext", "volumeMounts",
}  # fmt: skip


class Problem(Exception):
    """A `Status` of failure."""

    def __init__(self, code: int, reason: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.code, self.reason, self.headers = code, reason, headers

    def status(self) -> dict[str, Any]:
        return {
            **{"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"},
            **{"message": str(self), "reason": self.reason, "code": self.code},
        }


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class FakeKubernetes:
    """The API server; `node` runs its pods."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fake-kubernetes-"))
        self.folder.chmod(0o755)
        self.faults = Faults()
        self.objects: dict[str, dict[str, dict[str, Any]]] = {kind: {} for kind in KINDS}
        self.runtime_classes: set[str] = set()
        self.history: list[tuple[int, str, str, dict[str, Any]]] = []
        self.oldest = 0
        self.page = 500
        self.bookmark_s = 0.5
        self.node = node.Node(self)
        self.url = ""
        self._version = 100
        self._changed = asyncio.Event()
        self._watches: set[asyncio.Task[Any]] = set()
        self._runner: web.AppRunner | None = None

    @property
    def pods(self) -> dict[str, dict[str, Any]]:
        return self.objects["pods"]

    def kubeconfig(self) -> Path:
        """A file that leads here."""
        path = self.folder / "config.json"
        cluster, user = {"server": self.url}, {"token": TOKEN}
        context = {"cluster": "fake", "user": "me", "namespace": NAMESPACE}
        told = {
            **{"apiVersion": "v1", "kind": "Config", "current-context": "here"},
            "clusters": [{"name": "fake", "cluster": cluster}],
            "users": [{"name": "me", "user": user}],
            "contexts": [{"name": "here", "context": context}],
        }
        path.write_text(json.dumps(told))
        return path

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        app = web.Application(middlewares=[self._middleware], client_max_size=8 << 20)
        app.router.add_route("*", "/{tail:.*}", self._dispatch)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        self.end_watches()
        await self.node.close()
        if self._runner is not None:
            await self._runner.cleanup()
        shutil.rmtree(self.folder, ignore_errors=True)

    def forget_history(self) -> None:
        """The server compacts: whoever watches from before now hears that it is gone."""
        self.oldest = self._version
        self.history.clear()
        self.end_watches()

    def end_watches(self) -> None:
        """Every watch is cut off, as when a load balancer has had enough."""
        for task in list(self._watches):
            task.cancel()

    def store(self, kind: str, event: str, found: dict[str, Any]) -> None:
        """Keep an object with a new version, and tell all watches."""
        self._version += 1
        found["metadata"]["resourceVersion"] = str(self._version)
        name = found["metadata"]["name"]
        if event == "DELETED":
            self.objects[kind].pop(name, None)
        else:
            self.objects[kind][name] = found
        self.history.append((self._version, kind, event, copy.deepcopy(found)))
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Any) -> web.StreamResponse:
        fault = self.faults.next(request)
        try:
            if fault is not None and not fault.is_after:
                if not fault.status:
                    return hang_up(request)
                raise Problem(fault.status, "Planned", fault.message, fault.headers)
            if request.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise Problem(401, "Unauthorized", "Unauthorized")
            answer: web.StreamResponse = await handler(request)
        except Problem as problem:
            answer = web.json_response(problem.status(), status=problem.code, headers=problem.headers)
        return hang_up(request) if fault is not None and fault.is_after else answer

    async def _dispatch(self, request: web.Request) -> web.StreamResponse:
        words = request.path.strip("/").split("/")
        if words == ["version"]:
            return web.json_response({"major": "1", "minor": "31", "gitVersion": "v1.31.0"})
        if words[:3] == ["apis", "node.k8s.io", "v1"]:
            if words[-1] not in self.runtime_classes:
                raise self._missing("runtimeclasses.node.k8s.io", words[-1])
            return web.json_response({"kind": "RuntimeClass", "metadata": {"name": words[-1]}, "handler": "runsc"})
        root = words[:2] if words[0] == "api" else words[:3]
        if words[len(root) : len(root) + 2] != ["namespaces", NAMESPACE]:
            raise Problem(403, "Forbidden", f"forbidden: {request.path}")
        kind, *name = words[len(root) + 2 :]
        if kind not in KINDS or "/".join(root[1:]) != KINDS[kind][0]:
            raise Problem(404, "NotFound", "the server could not find the requested resource")
        if name:
            return await self._one(request, kind, name[0])
        if request.method == "POST":
            return await self._create(request, kind)
        if request.query.get("watch") in ("1", "true"):
            return await self._watch(request, kind)
        return self._list(request, kind)

    def _missing(self, kind: str, name: str) -> Problem:
        return Problem(404, "NotFound", f'{kind} "{name}" not found')

    async def _one(self, request: web.Request, kind: str, name: str) -> web.Response:
        found = self.objects[kind].get(name)
        if found is None:
            raise self._missing(kind, name)
        if request.method == "GET":
            return web.json_response(found)
        body = await request.json() if request.can_read_body else {}
        if request.method == "DELETE":
            return await self._delete(kind, found, body)
        if request.headers["Content-Type"] != "application/merge-patch+json":
            raise Problem(415, "UnsupportedMediaType", f"{request.headers['Content-Type']} is not supported here")
        return self._patch(kind, found, body)

    def _patch(self, kind: str, found: dict[str, Any], body: dict[str, Any]) -> web.Response:
        seen, current = body.get("metadata", {}), found["metadata"]
        for key in ("resourceVersion", "uid"):
            if key in seen and seen[key] != current[key]:
                words = "the object has been modified; please apply your changes to the latest version and try again"
                raise Problem(409, "Conflict", f'Operation cannot be fulfilled on {kind} "{current["name"]}": {words}')
        if kind == "pods":
            self._check_pod_patch(found, body.get("spec", {}))
        made = merge(copy.deepcopy(found), body)
        self.store(kind, "MODIFIED", made)
        return web.json_response(made)

    @staticmethod
    def _check_pod_patch(found: dict[str, Any], spec: dict[str, Any]) -> None:
        old, new = found["spec"]["activeDeadlineSeconds"], spec.get("activeDeadlineSeconds", 0)
        if set(spec) - {"activeDeadlineSeconds"} or new > old:
            raise Problem(422, "Invalid", "pod updates may not change fields other than ...")

    async def _delete(self, kind: str, found: dict[str, Any], body: dict[str, Any]) -> web.Response:
        for key, wanted in (body.get("preconditions") or {}).items():
            if found["metadata"][key] != wanted:
                raise Problem(409, "Conflict", f"Precondition failed: {key}")
        await self.remove(kind, found)
        return web.json_response({"kind": "Status", "status": "Success"})

    async def remove(self, kind: str, found: dict[str, Any]) -> None:
        """Delete an object, and in time what it owns."""
        name = found["metadata"]["name"]
        if kind == "pods":
            found["metadata"]["deletionTimestamp"] = now()
            self.store(kind, "MODIFIED", found)
            await self.node.stop(name)
            found = self.objects[kind].get(name, found)
        self.store(kind, "DELETED", found)
        for other in list(self.pods.values()):
            if any(ref["uid"] == found["metadata"]["uid"] for ref in other["metadata"].get("ownerReferences", ())):
                await self.remove("pods", other)

    async def _create(self, request: web.Request, kind: str) -> web.Response:
        made = await request.json()
        if (made["apiVersion"], made["kind"]) != KINDS[kind]:
            raise Problem(400, "BadRequest", "the API version in the data does not match the expected API version")
        metadata = made["metadata"]
        if "name" not in metadata:
            metadata["name"] = f"{metadata['generateName']}{secrets.token_hex(3)[:5]}"
        if metadata["name"] in self.objects[kind]:
            raise Problem(409, "AlreadyExists", f'{kind} "{metadata["name"]}" already exists')
        metadata |= {"namespace": NAMESPACE, "uid": secrets.token_hex(8), "creationTimestamp": now()}
        if kind == "pods":
            self._check_pod(made["spec"])
            made["status"] = {"phase": "Pending"}
        self.store(kind, "ADDED", made)
        if kind == "pods":
            self.node.run(made)
        return web.json_response(made, status=201)

    def _check_pod(self, spec: dict[str, Any]) -> None:
        """What the API refuses, and what a namespace with the `restricted` standard does."""
        [container] = spec["containers"]
        unknown = (set(spec) - POD_FIELDS) | (set(container) - CONTAINER_FIELDS)
        if unknown:
            raise Problem(400, "BadRequest", f"strict decoding error: unknown fields {sorted(unknown)}")
        context = container["securityContext"]
        is_restricted = (
            context["allowPrivilegeEscalation"] is False
            and context["capabilities"] == {"drop": ["ALL"]}
            and context["runAsNonRoot"] is True
            and context["seccompProfile"] == {"type": "RuntimeDefault"}
        )
        if not is_restricted:
            raise Problem(403, "Forbidden", 'pods is forbidden: violates PodSecurity "restricted:latest"')
        if spec.get("runtimeClassName", next(iter(self.runtime_classes), "")) not in {*self.runtime_classes, ""}:
            raise Problem(403, "Forbidden", f'pod rejected: RuntimeClass "{spec["runtimeClassName"]}" not found')

    def _selected(self, request: web.Request, kind: str) -> list[dict[str, Any]]:
        wanted = dict(text.split("=", 1) for text in request.query.get("labelSelector", "").split(",") if text)
        return [found for found in self.objects[kind].values() if matches(found, wanted)]

    def _list(self, request: web.Request, kind: str) -> web.Response:
        found = self._selected(request, kind)
        limit = min(int(request.query.get("limit", self.page)), self.page)
        start = int(base64.b64decode(request.query["continue"])) if "continue" in request.query else 0
        metadata: dict[str, Any] = {"resourceVersion": str(self._version)}
        if len(found) > start + limit:
            metadata["continue"] = base64.b64encode(str(start + limit).encode()).decode()
        return web.json_response(
            {"kind": f"{KINDS[kind][1]}List", "metadata": metadata, "items": found[start : start + limit]}
        )

    async def _watch(self, request: web.Request, kind: str) -> web.StreamResponse:
        """Events as lines of JSON. A version that is too old is told in the stream, after a status of 200."""
        version = int(request.query["resourceVersion"])
        wanted = dict(text.split("=", 1) for text in request.query["labelSelector"].split(","))
        answer = web.StreamResponse(headers={"Content-Type": "application/json", "Transfer-Encoding": "chunked"})
        await answer.prepare(request)
        task = asyncio.current_task()
        assert task is not None
        self._watches.add(task)
        try:
            if version < self.oldest:
                gone = Problem(410, "Expired", f"too old resource version: {version} ({self.oldest})")
                await answer.write(json.dumps({"type": "ERROR", "object": gone.status()}).encode() + b"\n")
                return answer
            while True:
                changed = self._changed
                for number, event, found in self._since(kind, version, wanted):
                    version = number
                    line = json.dumps({"type": event, "object": found}).encode() + b"\n"
                    await answer.write(line[:50])
                    await answer.write(line[50:])
                try:
                    async with asyncio.timeout(self.bookmark_s):
                        await changed.wait()
                except TimeoutError:
                    version = max(version, self._version)
                    mark = {"kind": KINDS[kind][1], "metadata": {"resourceVersion": str(version)}}
                    await answer.write(json.dumps({"type": "BOOKMARK", "object": mark}).encode() + b"\n")
        except asyncio.CancelledError:
            if request.transport is not None:
                request.transport.abort()
            return answer
        finally:
            self._watches.discard(task)

    def _since(self, kind: str, version: int, wanted: dict[str, str]) -> Iterator[tuple[int, str, dict[str, Any]]]:
        for number, of_kind, event, found in list(self.history):
            if number > version and of_kind == kind and matches(found, wanted):
                yield number, event, found


def matches(found: dict[str, Any], wanted: dict[str, str]) -> bool:
    return wanted.items() <= (found["metadata"].get("labels") or {}).items()


def merge(target: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """RFC 7386: objects by key, everything else as a whole, null removes."""
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict):
            target[key] = merge(target.get(key) if isinstance(target.get(key), dict) else {}, value)
        else:
            target[key] = value
    return target
