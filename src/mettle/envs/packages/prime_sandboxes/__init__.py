"""Sandboxes with the names that environments know from `prime_sandboxes`, on machines of this host.

Parts: `models` (requests and answers), `errors`, `client` (asynchronous and blocking), `depot` (the machines of this
process), `alias` (`import prime_sandboxes` inside this process). Invariant: no network, no account, no key; what a
request asks for and the embedded backend cannot give (another image, a GPU) is named once in a warning.
"""

from __future__ import annotations

from mettle.envs.packages.prime_sandboxes.client import (
    APIClient,
    AsyncSandboxClient,
    SandboxClient,
    ThreadedAsyncSandboxClient,
)
from mettle.envs.packages.prime_sandboxes.depot import Depot, DepotConfig, configure
from mettle.envs.packages.prime_sandboxes.errors import (
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
from mettle.envs.packages.prime_sandboxes.models import (
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
    "Depot",
    "DepotConfig",
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
    "ThreadedAsyncSandboxClient",
    "UnauthorizedError",
    "UploadTimeoutError",
    "configure",
]
