"""What `SandboxEnv`, `PythonEnv` and `CliAgentEnv` ask for machines with: the client that the v0 API has for them.

Parts: `models` (requests and answers), `errors`, `client` (asynchronous and blocking), `boxes` (one sandbox), `shared`
(the machines of this process). The names are those that environments know from `prime_sandboxes`, which leads here
where it is not installed (`legacy.prime_sandboxes`). Invariant: no network, no account, no key; what a request asks for
and the embedded backend cannot give is refused (another image) or named once in a warning (a GPU).
"""

from __future__ import annotations

from mettle.envs.sandboxes.client import (
    APIClient,
    AsyncSandboxClient,
    SandboxClient,
    ThreadedAsyncSandboxClient,
)
from mettle.envs.sandboxes.errors import (
    APIError,
    APITimeoutError,
    CommandTimeoutError,
    DownloadTimeoutError,
    PaymentRequiredError,
    SandboxFileNotFoundError,
    SandboxFileTooLargeError,
    SandboxImagePullError,
    SandboxNotRunningError,
    SandboxOOMError,
    SandboxTimeoutError,
    UnauthorizedError,
    UploadTimeoutError,
)
from mettle.envs.sandboxes.models import (
    AdvancedConfigs,
    BackgroundJob,
    BackgroundJobStatus,
    BulkDeleteSandboxResponse,
    CommandResponse,
    CreateSandboxRequest,
    FileUploadResponse,
    ReadFileResponse,
    Sandbox,
    SandboxListResponse,
    SandboxStatus,
)
from mettle.envs.sandboxes.shared import SharedMachines, SharedMachinesConfig, configure

__all__ = [
    "APIClient",
    "APIError",
    "APITimeoutError",
    "AdvancedConfigs",
    "AsyncSandboxClient",
    "BackgroundJob",
    "BackgroundJobStatus",
    "BulkDeleteSandboxResponse",
    "CommandResponse",
    "CommandTimeoutError",
    "CreateSandboxRequest",
    "DownloadTimeoutError",
    "FileUploadResponse",
    "PaymentRequiredError",
    "ReadFileResponse",
    "Sandbox",
    "SandboxClient",
    "SandboxFileNotFoundError",
    "SandboxFileTooLargeError",
    "SandboxImagePullError",
    "SandboxListResponse",
    "SandboxNotRunningError",
    "SandboxOOMError",
    "SandboxStatus",
    "SandboxTimeoutError",
    "SharedMachines",
    "SharedMachinesConfig",
    "ThreadedAsyncSandboxClient",
    "UnauthorizedError",
    "UploadTimeoutError",
    "configure",
]
