"""How a cluster is reached: a kubeconfig, or the service account of this pod; `kubernetes_asyncio` reads both.

Invariant: credentials are never logged; those that change are read again: a file's each minute, a program's when they
expire, and all of them when the server has refused them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Self

from mettle.errors import UserError
from mettle.sandbox.containers.kubernetes.config import KubernetesConfig

try:
    import yaml
    from kubernetes_asyncio.client import ApiClient, Configuration
    from kubernetes_asyncio.client.rest import RESTClientObject
    from kubernetes_asyncio.config import ConfigException, load_incluster_config, load_kube_config
except ImportError as error:
    missing = str(error.name).partition(".")[0]
    raise UserError(f"the backend kubernetes needs {missing}: pip install 'mettle-lab[kubernetes]'") from None

_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TOKEN_AGE_S: Final = 60.0
_UNUSABLE: Final = (
    *(AssertionError, AttributeError, ConfigException, KeyError, OSError, TypeError, ValueError, yaml.YAMLError),
)


class Access:
    """One cluster as one user."""

    def __init__(self, configuration: Configuration, namespace: str, path: str | None, context: str | None) -> None:
        self.api = ApiClient(configuration)
        self.namespace = namespace
        self._configuration = configuration
        self._path = path
        self._context = context
        self._until = float("inf")

    @classmethod
    async def open(cls, config: KubernetesConfig, environ: Mapping[str, str] = os.environ) -> Self:
        """As the config names it, or what there is. Raises: UserError."""
        configuration = Configuration()
        configuration.connection_pool_maxsize = config.max_requests + 1  # the watch of pods holds one
        if config.kubeconfig is None and environ.get("KUBERNETES_SERVICE_HOST"):
            try:
                load_incluster_config(configuration, environ=environ)  # type: ignore[no-untyped-call]
                namespace = config.namespace or (_ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
            except (ConfigException, OSError) as error:
                raise UserError(f"this pod's service account: {error}; set sandbox.kubernetes.kubeconfig") from error
            return cls(configuration, namespace, None, None)
        named = config.kubeconfig or environ.get("KUBECONFIG") or Path.home() / ".kube" / "config"
        path = os.path.expanduser(named)  # noqa: ASYNC240 - no file is touched
        if not os.access(path.partition(os.pathsep)[0], os.R_OK):
            raise UserError(f"no cluster: {path} cannot be read, and this is no pod; set sandbox.kubernetes.kubeconfig")
        loader = await _load(path, config.context, configuration)
        namespace = loader.current_context["context"].get("namespace")
        access = cls(configuration, config.namespace or namespace or "default", path, config.context)
        access._note_expiry(loader)
        return access

    @property
    def server(self) -> str:
        return str(self._configuration.host)

    async def refresh(self, *, is_refused: bool = False) -> None:
        """Read credentials again where it is time to; those of a pod's own account refresh themselves."""
        if self._path is None or (time.monotonic() < self._until and not is_refused):
            return
        certificate = self._configuration.cert_file
        self._note_expiry(await _load(self._path, self._context, self._configuration))
        if self._configuration.cert_file != certificate:
            old, self.api.rest_client = self.api.rest_client, RESTClientObject(self._configuration)
            await old.close()

    async def close(self) -> None:
        await self.api.close()

    def _note_expiry(self, loader: Any) -> None:
        expiry: datetime | None = getattr(loader, "exec_plugin_expiry", None)
        has_file = loader._user is not None and "tokenFile" in loader._user
        left_s = _TOKEN_AGE_S if has_file else float("inf")
        if expiry is not None:
            left_s = max(1.0, expiry.timestamp() - time.time() - _TOKEN_AGE_S / 2)
        self._until = time.monotonic() + left_s


async def _load(path: str, context: str | None, configuration: Configuration) -> Any:
    try:
        return await load_kube_config(path, context, configuration, persist_config=False)
    except _UNUSABLE as error:
        raise UserError(f"{path} is no usable kubeconfig: {type(error).__name__}: {error}") from error
