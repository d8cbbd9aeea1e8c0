"""What a sandbox client raises, under the names and with the arguments that environments catch."""

from __future__ import annotations


class APIError(Exception):
    """A request could not be fulfilled."""


class APITimeoutError(APIError):
    """A request took too long."""


class UnauthorizedError(APIError):
    """Never raised here: there is nobody to log in to."""


class PaymentRequiredError(APIError):
    """Never raised here: there is nobody to pay."""


class SandboxFileNotFoundError(APIError):
    """There is no such file in the sandbox."""


class SandboxFileTooLargeError(APIError):
    """The file is larger than may be read at once."""


class CommandTimeoutError(RuntimeError):
    """A command used up its time, and was ended with everything that it had started."""

    def __init__(self, sandbox_id: str, command: str, timeout: float) -> None:
        super().__init__(f"Command '{command}' timed out after {timeout}s in sandbox {sandbox_id}")
        self.sandbox_id, self.command, self.timeout = sandbox_id, command, timeout


class _TransferTimeoutError(RuntimeError):
    what = "Transfer"

    def __init__(self, sandbox_id: str, file_path: str, timeout: float) -> None:
        super().__init__(f"{self.what} of '{file_path}' timed out after {timeout}s in sandbox {sandbox_id}")
        self.sandbox_id, self.file_path, self.timeout = sandbox_id, file_path, timeout


class UploadTimeoutError(_TransferTimeoutError):
    """A file did not get in in time."""

    what = "Upload"


class DownloadTimeoutError(_TransferTimeoutError):
    """A file did not get out in time."""

    what = "Download"


class SandboxNotRunningError(RuntimeError):
    """The sandbox has ended, or never was."""

    def __init__(
        self,
        sandbox_id: str,
        status: str | None = None,
        error_type: str | None = None,
        command: str | None = None,
        message: str | None = None,
    ) -> None:
        super().__init__(message or f"Sandbox {sandbox_id} is not running (status {status or 'unknown'})")
        self.sandbox_id, self.status, self.error_type, self.command = sandbox_id, status, error_type, command


class SandboxOOMError(SandboxNotRunningError):
    """Never raised here: a command that runs out of memory ends with 137, and its sandbox lives on."""


class SandboxTimeoutError(SandboxNotRunningError):
    """The sandbox has ended because its time was over."""


class SandboxImagePullError(SandboxNotRunningError):
    """Never raised here: nothing is pulled."""
