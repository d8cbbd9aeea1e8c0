"""Programs that take all there is of something that the kernel counts by user or for the whole host, and hold it; and
one that finds out whether a neighbour still has its share.

Each hoard prints "held N" and then waits; `least` is what it must get to be worth the name, 0 for what is refused.
`counts` says what the kernel counts it by. A hoard leaves its own memory limit alone, so that nothing but the counter
is used up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_HEAD = """
import array, ctypes, errno, fcntl, os, resource, select, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
ends = []
def call(*arguments):
    return libc.syscall(*[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
def until_refused(take, most=100_000):
    n = 0
    try:
        for n in range(most): ends.append(take())
    except (OSError, RuntimeError): pass
    return n
def in_children(number, take, most=100_000):
    r, w = os.pipe()
    for _ in range(number):
        try: pid = os.fork()
        except OSError: break
        if pid == 0:
            n = until_refused(take, most)
            os.write(w, b"%12d" % n); time.sleep(600)
    os.close(w) if number == 0 else None
    total = 0
    for _ in range(number): total += int(os.read(r, 12))
    return total
def held(number):
    os.write(1, b"held %d\\n" % number)
    time.sleep(600)
"""


@dataclass(frozen=True)
class Hoard:
    """What is taken, by which program, and how much it must be."""

    name: str
    code: str
    least: int
    counts: str
    is_quick: bool = False  # run by default, and not only at night

    @property
    def program(self) -> str:
        return _HEAD + self.code


HOARDS: Final = [
    Hoard(
        "pages of pipes",
        "held(in_children(12, os.pipe))",
        3000,
        "user of the host (pipe-user-pages-soft: 1,024 pipes)",
        is_quick=True,
    ),
    Hoard(
        "descriptors on their way",
        "pairs = [socket.socketpair() for _ in range(40)]\n"
        "for a, _ in pairs: a.setblocking(False)\n"
        "n = 0\n"
        "for _ in range(40):\n"
        "    for a, _ in pairs:\n"
        "        try: socket.send_fds(a, [b'x'], [0] * 200); n += 200\n"
        "        except OSError: pass\n"
        "held(n)",
        400,
        "user of the host (the sender's limit of open files)",
        is_quick=True,
    ),
    Hoard(
        "instances of inotify",
        "def take():\n    if libc.inotify_init() < 0: raise OSError\nheld(until_refused(take))",
        16,
        "user of the host (fs.inotify.max_user_instances: 128), along the chain of namespaces",
        is_quick=True,
    ),
    Hoard(
        "watches of inotify",
        "fd = libc.inotify_init()\nnumbers = iter(range(10**6))\n"
        "def take():\n"
        "    path = f'd{next(numbers)}'; os.mkdir(path)\n"
        "    if libc.inotify_add_watch(fd, path.encode(), 0x100) < 0: raise OSError\n"
        "held(until_refused(take, 20_000))",
        1000,
        "user of the host (fs.inotify.max_user_watches), along the chain of namespaces",
    ),
    Hoard(
        "queued signals",
        "number = signal.SIGRTMIN + 1\nsignal.pthread_sigmask(signal.SIG_BLOCK, {number})\n"
        "info = ctypes.create_string_buffer(128); ctypes.memmove(info, b'\\0' * 8 + b'\\xff' * 4, 12)\n"
        "def take():\n    if call(129, os.getpid(), number, ctypes.byref(info)) < 0: raise OSError\n"
        "held(in_children(8, take))",
        500,
        "user of the namespace (RLIMIT_SIGPENDING), along the chain of namespaces",
        is_quick=True,
    ),
    Hoard(
        "timers",
        "def take():\n    t = ctypes.c_int()\n    if call(222, 1, None, ctypes.byref(t)) < 0: raise OSError\n"
        "held(until_refused(take))",
        500,
        "as queued signals",
    ),
    Hoard(
        "message queues",
        "def take():\n    if call(240, b'q%d' % len(ends), os.O_CREAT | os.O_RDWR, 0o600, 0) < 0: raise OSError\n"
        "held(until_refused(take))",
        0,
        "user of the namespace (RLIMIT_MSGQUEUE)",
    ),
    Hoard(
        "keys",
        "def take():\n    if call(248, b'user', b'k%d' % len(ends), b'x' * 99, 99, -4) < 0: raise OSError\n"
        "held(until_refused(take))",
        0,
        "user of the host (kernel.keys.maxkeys: 200)",
    ),
    Hoard(
        "locks of files",
        "f = open('locked', 'w'); numbers = iter(range(0, 10**9, 2))\n"
        "def take(): fcntl.lockf(f, fcntl.LOCK_EX, 1, next(numbers))\n"
        "held(until_refused(take, 4_000))",
        2_000,
        "nothing (200 bytes of the kernel's memory each)",
    ),
    Hoard(
        "watches of epoll",
        "pipe = os.pipe()\nepolls = [select.epoll() for _ in range(100)]\nfds = [os.dup(pipe[0]) for _ in range(200)]\n"
        "pairs = iter([(e, f) for e in epolls for f in fds])\n"
        "def take(): e, f = next(pairs); e.register(f, select.EPOLLIN)\n"
        "held(until_refused(take, 20_000))",
        10_000,
        "user of the host (fs.epoll.max_user_watches: a 25th of memory)",
    ),
    Hoard(
        "processes",
        "def take():\n    if os.fork() == 0: time.sleep(600)\nheld(until_refused(take))",
        32,
        "user of the namespace (RLIMIT_NPROC), cgroup where there is one; the host's pid_max",
    ),
    Hoard(
        "terminals",
        "held(in_children(8, lambda: os.open('/dev/ptmx', os.O_RDWR)))",
        32,
        "the host (kernel.pty.max: 4,096)",
        is_quick=True,
    ),
    Hoard(
        "open files",
        "held(in_children(40, lambda: os.open('/usr/bin/env', os.O_RDONLY)))",
        10_000,
        "the host (fs.file-max)",
    ),
    Hoard(
        "files in memory",
        "f = open('full', 'wb')\ndef take(): f.write(bytes(1 << 20)); f.flush()\nheld(until_refused(take))",
        32,
        "its file system",
    ),
    Hoard(
        "the cache of pages",
        "n = 0\n"
        "for directory, _, names in os.walk('/usr/lib'):\n"
        "    for name in names:\n"
        "        try:\n"
        "            with open(os.path.join(directory, name), 'rb') as f:\n"
        "                while data := f.read(1 << 20): n += len(data)\n"
        "        except OSError: pass\n"
        "        if n > 150 << 20: break\n"
        "held(n >> 20)",
        50,
        "the host; given back when memory is wanted",
    ),
    Hoard(
        "sockets full of data",
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "def take():\n"
        "    c = socket.create_connection(server.getsockname()); s = server.accept()[0]; c.setblocking(False)\n"
        "    try:\n"
        "        for _ in range(8): c.send(bytes(1 << 14))\n"
        "    except BlockingIOError: pass\n"
        "    return c, s\n"
        "held(until_refused(take, 300))",
        50,
        "the machine's memory; the host (net.ipv4.tcp_mem)",
    ),
    Hoard(
        "locked memory",
        "import mmap\n"
        "def take():\n"
        "    m = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
        "    if libc.mlock(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(m))), 4096): raise OSError\n"
        "    return m\n"
        "held(until_refused(take))",
        4,
        "the process (RLIMIT_MEMLOCK), the user of the namespace",
    ),
]

# What an ordinary program does with each of these. Reports what is wrong; a pipe that is too small stops it for ever.
SHARE: Final = """
import ctypes, fcntl, os, select, signal, socket, sys, threading, time
is_machine = len(sys.argv) > 1
wrong = []
def check(name, attempt):
    try:
        if (answer := attempt()) not in (None, True): wrong.append(f"{name}: {answer}")
    except Exception as error: wrong.append(f"{name}: {type(error).__name__} {error}")
def through_a_pipe():
    r, w = os.pipe(); data = bytes(range(256)) * 128
    os.write(w, data)
    return os.read(r, 1 << 16) == data
def passes_descriptors():
    a, b = socket.socketpair()
    socket.send_fds(a, [b"x"], [0] * 50)
    return len(socket.recv_fds(b, 1, 50)[1]) == 50
def queues_signals():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN})
    for _ in range(50): os.kill(os.getpid(), signal.SIGRTMIN)
def starts_others():
    for _ in range(3):
        pid = os.fork()
        if pid == 0: os._exit(0)
        os.waitpid(pid, 0)
    thread = threading.Thread(target=time.time); thread.start(); thread.join()
def writes_and_locks():
    with open("/tmp/share", "wb") as file:
        fcntl.lockf(file, fcntl.LOCK_EX); file.write(bytes(4 << 20))
    os.unlink("/tmp/share")
def watches_many():
    epoll, r = select.epoll(), os.pipe()[0]
    for _ in range(50): epoll.register(os.dup(r), select.EPOLLIN)
def watches_files():
    libc = ctypes.CDLL(None)
    fd = libc.inotify_init()
    return fd >= 0 and libc.inotify_add_watch(fd, b"/tmp", 0x100) >= 0
def talks():
    server = socket.create_server(("127.0.0.1", 0))
    with socket.create_connection(server.getsockname()) as client: client.sendall(b"x" * 9999)
    return len(server.accept()[0].recv(9999, socket.MSG_WAITALL)) == 9999
def has_terminals():
    import pty
    return all(pty.openpty() for _ in range(3))
for attempt in (through_a_pipe, passes_descriptors, queues_signals, starts_others, writes_and_locks, watches_many):
    check(attempt.__name__, attempt)
for attempt in (watches_files, talks, has_terminals) if is_machine else ():
    check(attempt.__name__, attempt)
print("; ".join(wrong) or "all right")
"""
