"""What the cluster is asked to make, as its API spells it.

Invariant: a pod asks for what the `restricted` pod security standard asks, and has no service account; what holds in
the end is measured from inside.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from datetime import UTC, datetime
from typing import Any, Final

from mettle.sandbox.containers.agent.boot import IDENTITY_VARIABLE
from mettle.sandbox.containers.agent.cells import PROGRAMS
from mettle.sandbox.containers.bundle import ARCHIVE, FOLDER, Bundle, agent_command
from mettle.sandbox.containers.kubernetes.config import KubernetesConfig
from mettle.sandbox.containers.pool import Shape

SANDBOX: Final = "mettle.dev/sandbox"
POOL: Final = "mettle.dev/pool"
SHAPE: Final = "mettle.dev/shape"
STATE: Final = "mettle.dev/state"
OWNER: Final = "mettle.dev/owner"
REQUEST: Final = "mettle.dev/request"
WARM: Final = "warm"
TAKEN: Final = "taken"
CONTAINER: Final = "machine"
LEASES: Final = "coordination.k8s.io/v1"
POLICIES: Final = "networking.k8s.io/v1"
_AGENT_MB: Final = 64
_SHM_MB: Final = 64
_NOWHERE: Final = {"dnsPolicy": "None", "dnsConfig": {"nameservers": ["127.0.0.1"]}}


def selector(pool: str) -> str:
    """Of everything that belongs to a pool."""
    return f"{SANDBOX}=1,{POOL}={pool}"


def shape_key(config: KubernetesConfig, shape: Shape, bundle: Bundle, runtime_class: str | None) -> str:
    """The same for pods that can stand for each other."""
    own = (config.interpreter, config.user, config.port, config.network, config.pull)
    told = json.dumps([repr(shape), own, bundle.digest, runtime_class, config.node_selector, config.tolerations])
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def owner_reference(lease: dict[str, Any]) -> dict[str, Any]:
    """So that the cluster removes what belongs to an owner when its lease is removed."""
    name, uid = lease["metadata"]["name"], lease["metadata"]["uid"]
    return {"apiVersion": LEASES, "kind": "Lease", "name": name, "uid": uid, "blockOwnerDeletion": False}


def lease_body(config: KubernetesConfig, owner: str, process: str) -> dict[str, Any]:
    """The sign of life of one owner."""
    return {
        "apiVersion": LEASES,
        "kind": "Lease",
        "metadata": {"name": f"mettle-{owner}", "labels": {SANDBOX: "1", POOL: config.pool}},
        "spec": {
            "holderIdentity": process[:200],
            "leaseDurationSeconds": config.lease_s,
            "acquireTime": micro_time(),
            "renewTime": micro_time(),
        },
    }


def micro_time() -> str:
    """Now, as a lease writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def read_time(text: str) -> float:
    """Seconds since 1970 of a time that the API has written."""
    return datetime.fromisoformat(text).timestamp()


def agent_body(bundle: Bundle) -> dict[str, Any]:
    """The agent, for pods to mount. It never changes: another agent has another name."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"mettle-agent-{bundle.digest}", "labels": {SANDBOX: "1"}},
        "immutable": True,
        "binaryData": {ARCHIVE: base64.b64encode(bundle.data).decode()},
    }


def policy_body(config: KubernetesConfig) -> dict[str, Any]:
    """Nothing out, and in only to the agent."""
    return {
        "apiVersion": POLICIES,
        "kind": "NetworkPolicy",
        "metadata": {"name": f"mettle-{config.pool}", "labels": {SANDBOX: "1", POOL: config.pool}},
        "spec": {
            "podSelector": {"matchLabels": {SANDBOX: "1", POOL: config.pool}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"ports": [{"protocol": "TCP", "port": config.port}]}],
            "egress": [],
        },
    }


def pod_body(
    config: KubernetesConfig,
    shape: Shape,
    bundle: Bundle,
    runtime_class: str | None,
    labels: dict[str, str],
    reference: dict[str, Any],
    identity: str,
    lifetime_s: float,
) -> dict[str, Any]:
    """The pod of a machine."""
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": math.ceil(lifetime_s),
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostname": "sandbox",
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": config.user,
            "runAsGroup": config.user,
            "fsGroup": config.user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(config, shape, identity)],
        "volumes": _volumes(shape, bundle),
        **(_NOWHERE if config.network == "none" else {}),
    }
    optional: dict[str, Any] = {
        "runtimeClassName": runtime_class,
        "nodeSelector": config.node_selector,
        "tolerations": list(config.tolerations),
        "imagePullSecrets": [{"name": name} for name in config.pull_secrets],
    }
    spec |= {name: value for name, value in optional.items() if value}
    metadata = {
        "generateName": "mettle-",
        "labels": {SANDBOX: "1", POOL: config.pool, **labels},
        "ownerReferences": [reference],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def identity_of(pod: dict[str, Any]) -> str:
    """The certificate and key of a pod's agent. Raises: KeyError for a pod that is none of ours."""
    variables = {entry["name"]: entry.get("value", "") for entry in pod["spec"]["containers"][0].get("env") or ()}
    return str(variables[IDENTITY_VARIABLE])


def _container(config: KubernetesConfig, shape: Shape, identity: str) -> dict[str, Any]:
    memory_mb = shape.memory_mb + shape.disk_mb + _SHM_MB + _AGENT_MB  # files in memory are counted, too
    share = config.requested_share
    return {
        "name": CONTAINER,
        "image": shape.image,
        "imagePullPolicy": config.pull,
        "command": agent_command(config.interpreter, "--port", str(config.port)),
        "workingDir": "/work",
        "env": [{"name": IDENTITY_VARIABLE, "value": identity}],
        "ports": [{"name": "agent", "containerPort": config.port, "protocol": "TCP"}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": {
            "limits": {"cpu": f"{math.ceil(shape.cpus * 1000)}m", "memory": f"{memory_mb}Mi"},
            "requests": {
                "cpu": f"{math.ceil(shape.cpus * share * 1000)}m",
                "memory": f"{math.ceil(memory_mb * share)}Mi",
            },
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "privileged": False,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [
            {"name": "agent", "mountPath": FOLDER, "readOnly": True},
            {"name": "work", "mountPath": "/work"},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "program", "mountPath": PROGRAMS},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def _volumes(shape: Shape, bundle: Bundle) -> list[dict[str, Any]]:
    sizes = {"work": shape.disk_mb, "tmp": shape.disk_mb, "program": shape.disk_mb, "shm": _SHM_MB}
    agent = {"name": "agent", "configMap": {"name": f"mettle-agent-{bundle.digest}", "defaultMode": 0o444}}
    in_memory = [
        {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": f"{size}Mi"}} for name, size in sizes.items()
    ]
    return [agent, *in_memory]
