"""The directory of what a cell runs: process 1 writes files into it, and the code can only read and execute them.

It is one file system mounted twice. The writable mount is covered by a read-only one before any code is there, and
the one descriptor that leads below the cover is process 1's. So no program, script, input or library that a test is
given can be changed by that test or by one before it: the kernel says EROFS, whatever the mode of the file.
Invariant: a file is complete and closed before the process that runs it is told to.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from mettle.sandbox.zygote import kernel

PROGRAM: Final = "/program"
_MAX_BYTES: Final = 512 << 20  # what is written is limited by the owner; this is for its mistakes
_MAX_FILES: Final = 256
_MODE: Final = 0o555


class ProgramDirectory:
    """Process 1's way into the directory; `path` is where the code sees it."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def mount(cls) -> ProgramDirectory:
        """Make it in this mount namespace; afterwards only this object can write there."""
        flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOATIME
        kernel.mount("tmpfs", PROGRAM, "tmpfs", flags, f"mode=0755,size={_MAX_BYTES},nr_inodes={_MAX_FILES}")
        descriptor = os.open(PROGRAM, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        kernel.mount(PROGRAM, PROGRAM, None, kernel.MS_BIND)
        kernel.lock_mounts(PROGRAM)
        return cls(PROGRAM, descriptor)

    @classmethod
    def make_open(cls, path: str) -> ProgramDirectory:
        """An ordinary directory, for the backend without a jail: there the code can change what it runs."""
        os.mkdir(path, 0o700)
        return cls(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def write(self, files: Sequence[tuple[str, int]], contents: memoryview) -> None:
        """Replace all files by these (name and length), whose contents follow one another."""
        for name in os.listdir(self._descriptor):
            os.unlink(name, dir_fd=self._descriptor)
        rest = contents
        for name, num_bytes in files:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            # Without a file object, whose buffer the next test's process would inherit.
            file = os.open(name, flags, _MODE, dir_fd=self._descriptor)
            try:
                data, rest = rest[:num_bytes], rest[num_bytes:]
                while data:
                    data = data[os.write(file, data) :]
                os.fchmod(file, _MODE)  # whatever the umask is
            finally:
                os.close(file)

    def remove(self) -> None:
        """Delete a directory that no end of a mount namespace takes away."""
        os.close(self._descriptor)
        if self.path != PROGRAM:
            import shutil  # whose libraries every fork of a template would pay for

            shutil.rmtree(self.path, ignore_errors=True)
