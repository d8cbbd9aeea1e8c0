"""A user of the host's for each cell and each machine, so that none can use up what the kernel counts by user.

Descriptors on their way through sockets, pages of pipes, watches of epoll and inotify, queued signals: each is counted
for a user of the host, whatever namespace asks for it, and who shares the user shares the count. So the template clones
each cell as another user, which is nobody else's, from a block of numbers that is this template's while it lives.

    root's pool       the template keeps the right to change its user and no other, and a filter (`seccomp.py`) that
                      lets it become the users of its block and never root again
    a user's pool     the ranges of /etc/subuid and /etc/subgid, which newuidmap and newgidmap put into its namespace

Invariant: a number is given to one living cell or machine at a time, unless more than a block of them live.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from mettle.sandbox.zygote import jail, kernel, seccomp
from mettle.sandbox.zygote.settings import Settings

BLOCK: Final = 4096
INSIDE: Final = 100_000  # where a template's own namespace shows the range that newuidmap gave it
_MAX_TRIES: Final = 64
_claims: list[socket.socket] = []


class IdBlock(NamedTuple):
    """Numbers of users and, the same ones, of groups, as the template's namespace counts."""

    first: int
    size: int


class HostUsers:
    """The users of one block; `own` is the template's own number."""

    def __init__(self, block: IdBlock, own: int) -> None:
        self.block = block
        self.own = own
        self._free = deque(range(block.first, block.first + block.size))
        self._taken: dict[int, int] = {}

    def clone(self, flags: int) -> tuple[int, int]:
        """A process in new namespaces that belong to a user of its own: its pid (0 in itself), and the user."""
        user = self._free.popleft() if self._free else _any_of(list(self._taken.values()))
        _become(user)
        try:
            pid = kernel.clone_process(flags)
        except OSError:
            self._return(user)
            raise
        if pid == 0:
            kernel.set_dumpable(True)  # changing the user made /proc/self root's
            return 0, user
        self._return(None)
        self._taken[pid] = user
        return pid, user

    def give_back(self, pid: int) -> None:
        """What has been cloned as this process has ended; its user comes last in the row."""
        user = self._taken.pop(pid, None)
        if user is not None and user not in self._taken.values():
            self._free.append(user)

    def why_unusable(self) -> str:
        """Why such a user could not run anything here; "" if it can."""
        library = os.path.realpath(os.__file__)

        def read() -> None:
            _become(self.block.first)
            os.close(os.open(library, os.O_RDONLY))

        return f"other users cannot read this interpreter's {library}" if _error_of(read) else ""

    def _return(self, unused: int | None) -> None:
        _become(self.own)
        kernel.die_with_parent()  # which a change of user ends
        if unused is not None and unused not in self._taken.values():
            self._free.append(unused)


def _random_below(limit: int) -> int:
    """By the kernel's random numbers: the module `random` would draw a state of its own in every fork."""
    return int.from_bytes(os.urandom(8)) % limit


def _any_of(users: Sequence[int]) -> int:
    return users[_random_below(len(users))]


def _become(user: int) -> None:
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def claim_as_root(settings: Settings) -> HostUsers | str:
    """Users for what root's template makes, while it is still root; or why there are none."""
    if why := seccomp.why_unsupported():
        return f"nothing would keep the template from being root again: {why}"
    first, number = settings.host_ids
    if number < BLOCK:
        return f"sandbox.num_host_uids is {number}"
    block = _claim_block(first, number)
    if block is None:
        return f"all users from {first:,} to {first + number - 1:,} are taken by other pools"
    with open(os.devnull, encoding="ascii"):
        "".encode("ascii")  # loads the codec, while the interpreter's files can be read
    users = HostUsers(block, settings.host_uid)
    if error := _error_of(lambda: _try(users)):
        return f"user {block.first:,} of the host cannot be had here: {os.strerror(error)}"
    return users


def _try(users: HostUsers) -> None:
    """All that there is to it, in a process that ends."""
    user = users.block.first + users.block.size - 1
    stay_ordinary(users)
    _become(user)
    kernel.set_dumpable(True)
    kernel.unshare(kernel.CLONE_NEWUSER)
    jail.map_user(1, user)


def stay_ordinary(users: HostUsers) -> None:
    """From root to an ordinary user who can become the users of the block, and nobody else, for good."""
    own = users.own
    kernel.keep_capabilities()
    jail.become_ordinary(own)
    kernel.hold_capabilities((kernel.CAP_KILL, kernel.CAP_SETGID, kernel.CAP_SETUID))
    kernel.renounce_new_privileges()
    # What it clones inherits the filter, and finds one user in its namespace.
    kernel.install_filter(seccomp.build_user_filter((own, jail.SANDBOX_UID), users.block.first, users.block.size))


def claim_subordinates(settings: Settings) -> IdBlock | str:
    """The part of an ordinary user's ranges that is this template's, as the host counts; or why there is none."""
    if not settings.sub_ids:
        return settings.why_no_sub_ids
    first_uid, num_uids, _, num_gids = settings.sub_ids
    block = _claim_block(first_uid, min(num_uids, num_gids))
    return block or f"all users from {first_uid:,} to {first_uid + num_uids - 1:,} are taken by other pools"


class Mapper:
    """A process that stays outside and maps the block into the template's new user namespace, once asked to."""

    def __init__(self, settings: Settings, block: IdBlock) -> None:
        uid, gid, template = os.getuid(), os.getgid(), os.getpid()
        first_uid, _, first_gid, _ = settings.sub_ids
        ranges = (("newuidmap", uid, block.first), ("newgidmap", gid, first_gid + block.first - first_uid))
        wait, self._go = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._go)
            is_asked = os.read(wait, 1)
            os._exit(_error_of(lambda: _map(template, ranges, block.size)) if is_asked else 1)
        os.close(wait)

    def map(self) -> bool:
        """Whether both maps were written."""
        os.write(self._go, b"1")
        os.close(self._go)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1]) == 0


def _map(pid: int, ranges: tuple[tuple[str, int, int], ...], size: int) -> None:
    for program, own, first in ranges:
        words = [program, *map(str, (pid, jail.SANDBOX_UID, own, 1, INSIDE, first, size))]
        child = os.posix_spawnp(program, words, {"PATH": "/usr/local/bin:/usr/bin:/bin"})
        if os.waitpid(child, 0)[1]:
            raise OSError(1, f"{program} refused")


def enter_namespace(settings: Settings, block: IdBlock | str) -> HostUsers | str:
    """Enter a user namespace of the template's own, with the block in it if there is one; the users, or why not."""
    uid, gid = os.geteuid(), os.getegid()
    mapper = Mapper(settings, block) if isinstance(block, IdBlock) else None
    # What is counted along the chain of namespaces, and what all share who share a user, is half of it the owner's.
    shared = (resource.RLIMIT_SIGPENDING,) if mapper else (resource.RLIMIT_SIGPENDING, resource.RLIMIT_NOFILE)
    for kind in shared:
        jail.lower(kind, resource.getrlimit(kind)[0] // 2)
    kernel.unshare(kernel.CLONE_NEWUSER)
    users: HostUsers | str = "" if mapper is None else "newuidmap or newgidmap refused the ranges of /etc/subuid"
    if isinstance(block, str):
        users = block
    elif mapper is not None and mapper.map():
        users = HostUsers(IdBlock(INSIDE, block.size), jail.SANDBOX_UID)
    try:
        jail.map_unmapped(uid, gid)
    except OSError as error:
        raise OSError(error.errno, f"the user map was refused: {error.strerror}") from error
    kernel.set_control("user/max_inotify_instances", str(_host_number("fs/inotify/max_user_instances") // 2))
    kernel.set_control("user/max_inotify_watches", str(_host_number("fs/inotify/max_user_watches") // 2))
    return users


def _host_number(name: str) -> int:
    try:
        with open(f"/proc/sys/{name}", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 128


def _error_of(attempt: Callable[[], None]) -> int:
    """The number of the error of what is tried in a process of its own; 0 for none."""
    pid = os.fork()
    if pid > 0:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 1
    try:
        attempt()
        status = 0
    except OSError as error:
        status = (error.errno or 1) & 0xFF
    except BaseException as error:
        print(f"a host user was tried: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def _claim_block(first: int, number: int) -> IdBlock | None:
    """Numbers that no other template of this host has: each holds a name in the host's network while it lives."""
    num_blocks = number // BLOCK
    if num_blocks == 0:
        return None
    start = _random_below(num_blocks)
    for turn in range(min(_MAX_TRIES, num_blocks)):
        chosen = first + (start + turn) % num_blocks * BLOCK
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with contextlib.suppress(OSError):
            claim.bind(f"\0mettle-host-users-{chosen}")
            _claims.append(claim)
            return IdBlock(chosen, BLOCK)
        claim.close()
    return None
