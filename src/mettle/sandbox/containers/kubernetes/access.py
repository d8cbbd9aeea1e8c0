"""How a cluster is reached: a kubeconfig, or the service account of the pod that this is.

Invariant: credentials are read here and nowhere else, and never logged; a token that changes is read again.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import ssl
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from mettle.errors import UserError
from mettle.sandbox.containers.kubernetes.config import KubernetesConfig

_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TOKEN_AGE_S: Final = 60.0
_EXEC_S: Final = 60.0
_EARLY_S: Final = 30.0


@dataclass
class Access:
    """One cluster as one user."""

    server: str
    namespace: str
    tls: ssl.SSLContext | None
    token: str = ""
    token_file: Path | None = None
    program: dict[str, Any] = field(default_factory=dict)
    _until: float = 0.0

    async def headers(self) -> dict[str, str]:
        """What every request carries."""
        if time.monotonic() >= self._until:
            if self.token_file is not None:
                self.token = (await asyncio.to_thread(self.token_file.read_text)).strip()
                self._until = time.monotonic() + _TOKEN_AGE_S
            elif self.program:
                await self._ask_program()
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def forget_token(self) -> None:
        """The server did not take it: read it again."""
        self._until = 0.0

    async def _ask_program(self) -> None:
        """Run the kubeconfig's credential plugin."""
        program = self.program
        given = {entry["name"]: entry["value"] for entry in program.get("env") or ()}
        info = {"apiVersion": program["apiVersion"], "kind": "ExecCredential", "spec": {"interactive": False}}
        environment = {**os.environ, **given, "KUBERNETES_EXEC_INFO": json.dumps(info)}
        command = [program["command"], *(program.get("args") or ())]
        try:
            running = await asyncio.create_subprocess_exec(
                *command, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
            )
            async with asyncio.timeout(_EXEC_S):
                output, _ = await running.communicate()
            status = json.loads(output)["status"]
        except (OSError, ValueError, KeyError, TimeoutError) as error:
            raise UserError(f"the kubeconfig's program {command[0]!r} gave no credentials: {error}") from error
        self.token = status.get("token", "")
        if self.tls is not None and "clientCertificateData" in status:
            _load_pair(self.tls, status["clientCertificateData"].encode(), status["clientKeyData"].encode())
        self._until = time.monotonic() + _seconds_left(status.get("expirationTimestamp"))


def _seconds_left(stamp: str | None) -> float:
    if stamp is None:
        return float("inf")
    return max(1.0, datetime.fromisoformat(stamp).timestamp() - time.time() - _EARLY_S)


def find_access(config: KubernetesConfig, environ: Mapping[str, str] = os.environ) -> Access:
    """From what the config names, or what there is. Raises: UserError."""
    if config.kubeconfig is None and environ.get("KUBERNETES_SERVICE_HOST"):
        return _own_account(config, environ)
    named = config.kubeconfig or environ.get("KUBECONFIG", "").split(os.pathsep)[0] or Path.home() / ".kube" / "config"
    path = Path(named).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"no cluster: {path} cannot be read ({error.strerror}), and this is no pod; "
            "set sandbox.kubernetes.kubeconfig"
        ) from error
    try:
        return _from_kubeconfig(config, path.parent, _parse(text, path))
    except (KeyError, TypeError, ValueError, OSError, ssl.SSLError) as error:
        raise UserError(f"{path} is no usable kubeconfig: {type(error).__name__}: {error}") from error


def _own_account(config: KubernetesConfig, environ: Mapping[str, str]) -> Access:
    host, port = environ["KUBERNETES_SERVICE_HOST"], environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not (_ACCOUNT / "token").exists():
        raise UserError(f"this pod has no service account token in {_ACCOUNT}; set sandbox.kubernetes.kubeconfig")
    namespace = config.namespace or (_ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
    place = f"[{host}]" if ":" in host else host
    tls = ssl.create_default_context(cafile=str(_ACCOUNT / "ca.crt"))
    return Access(f"https://{place}:{port}", namespace, tls, token_file=_ACCOUNT / "token")


def _parse(text: str, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        try:
            import yaml  # type: ignore[import-untyped]
        except ImportError:
            raise UserError(f"{path} is YAML; pip install 'mettle-lab[kubernetes]' to read it") from None
        try:
            found = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UserError(f"{path} is no YAML: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} is no kubeconfig")
    return found


def _from_kubeconfig(config: KubernetesConfig, folder: Path, found: dict[str, Any]) -> Access:
    wanted = config.context or found.get("current-context", "")
    contexts = {entry["name"]: entry["context"] for entry in found.get("contexts") or ()}
    if wanted not in contexts:
        raise UserError(f"the kubeconfig has no context {wanted!r}; it has {', '.join(sorted(contexts)) or 'none'}")
    context = contexts[wanted]
    cluster = _entry(found, "clusters", "cluster", context["cluster"])
    user = _entry(found, "users", "user", context["user"]) if context.get("user") else {}
    if "auth-provider" in user:
        raise UserError("the kubeconfig's user has an auth-provider, which is gone from Kubernetes; use `exec`")
    return Access(
        server=str(cluster["server"]).rstrip("/"),
        namespace=config.namespace or context.get("namespace") or "default",
        tls=_make_tls(folder, cluster, user),
        token=user.get("token", ""),
        token_file=folder / user["tokenFile"] if "tokenFile" in user else None,
        program=user.get("exec") or {},
    )


def _entry(found: dict[str, Any], kind: str, inner: str, name: str) -> dict[str, Any]:
    for entry in found.get(kind) or ():
        if entry["name"] == name:
            chosen: dict[str, Any] = entry[inner]
            return chosen
    raise UserError(f"the kubeconfig names {name!r}, and its {kind} have no entry of that name")


def _make_tls(folder: Path, cluster: dict[str, Any], user: dict[str, Any]) -> ssl.SSLContext | None:
    if not str(cluster["server"]).startswith("https:"):
        return None
    made = ssl.create_default_context()
    if cluster.get("insecure-skip-tls-verify"):
        made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    authority = _bytes_of(folder, cluster, "certificate-authority")
    if authority:
        made = ssl.create_default_context(cadata=authority.decode())
    certificate, key = _bytes_of(folder, user, "client-certificate"), _bytes_of(folder, user, "client-key")
    if certificate and key:
        _load_pair(made, certificate, key)
    return made


def _bytes_of(folder: Path, entry: dict[str, Any], name: str) -> bytes:
    if f"{name}-data" in entry:
        return base64.b64decode(entry[f"{name}-data"])
    return (folder / entry[name]).read_bytes() if name in entry else b""


def _load_pair(tls: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """The library takes files only; this one is nobody else's, and gone at once."""
    with tempfile.NamedTemporaryFile(prefix="mettle-") as file:
        file.write(certificate + b"\n" + key)
        file.flush()
        tls.load_cert_chain(file.name)
