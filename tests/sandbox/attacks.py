"""Named attacks on the sandbox, as source that prints BREACH if it got through.

Each is given, on its standard input, a JSON object that describes what was planted on the host for it (see
`planted.py`). Where an attack succeeds it does no harm: it touches only what was planted, or undoes what it did.
`opens` says on which pool without isolation it is expected to get through, which proves that its check can fail:
"any", "root" (only when the tests run as root), or "" (a limit or the grading itself stops it there too).
`is_harmful` ones are never run without isolation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PRELUDE = """
import ctypes, errno, json, os, socket, sys
host = json.loads(sys.stdin.readline())
libc = ctypes.CDLL(None, use_errno=True)
def breach(*words): print("BREACH", *words, flush=True)
def call(*arguments):
    ctypes.set_errno(0)
    passed = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = libc.syscall(*passed)
    return result, ctypes.get_errno()
def answered(*arguments):
    result, error = call(*arguments)
    return result >= 0 or error not in (errno.EPERM, errno.EACCES, errno.ENOSYS)
def works(attempt, *arguments):
    try:
        attempt(*arguments)
        return True
    except (OSError, ValueError, RuntimeError, MemoryError):
        return False
"""


@dataclass(frozen=True)
class Attack:
    """One attack. `first` is run beforehand, as another solution."""

    name: str
    code: str
    opens: Literal["any", "root", ""] = "any"
    is_harmful: bool = False
    first: str = ""


FILES = [
    Attack("reads a file of the host", "print(open(host['secret_file']).read()); breach()"),
    Attack("lists a directory of the host", "print(os.listdir(host['directory'])); breach()"),
    Attack("writes to a directory of the host", "open(host['directory'] + '/owned', 'w').write('x'); breach()"),
    Attack(
        "writes among the system's files",
        "for where in ('/', '/usr', '/etc', '/dev', os.path.dirname(os.__file__)):\n"
        "    path = where + '/.mettle-attack'\n"
        "    if works(lambda: os.close(os.open(path, os.O_CREAT | os.O_WRONLY))):\n"
        "        os.unlink(path); breach(where)",
        opens="root",
    ),
    Attack("reads the password hashes", "open('/etc/shadow').read(); breach()", opens="root"),
    Attack(
        "walks to the host's root through /proc",
        "for pid in ('1', 'self', str(os.getppid())):\n"
        "    path = f'/proc/{pid}/root' + host['secret_file']\n"
        "    if works(lambda: open(path).read()): breach(pid)",
    ),
    Attack(
        "follows a symbolic link out",
        "os.symlink('/proc/self/root' + host['secret_file'], 'link'); open('link').read(); breach()",
    ),
    Attack(
        "opens a file by its handle",
        "class Handle(ctypes.Structure):\n"
        "    _fields_ = [('n', ctypes.c_uint), ('t', ctypes.c_int), ('b', ctypes.c_char * 128)]\n"
        "handle, mount = Handle(128), ctypes.c_int()\n"
        "path = os.__file__.encode()\n"
        "result, error = call(303, -100, path, ctypes.byref(handle), ctypes.byref(mount), 0)\n"
        "if result == 0 and call(304, os.open('/usr', os.O_RDONLY), ctypes.byref(handle), 0)[0] >= 0: breach()",
        opens="root",
    ),
    Attack("reads the cgroup file system", "os.listdir('/sys/fs/cgroup'); breach()"),
    Attack(
        "opens devices",
        "for name in ('kmsg', 'mem', 'vda', 'kvm', 'fuse', 'loop-control', 'vsock', 'ptmx'):\n"
        "    if works(lambda: os.close(os.open('/dev/' + name, os.O_RDONLY | os.O_NONBLOCK))): breach(name)",
    ),
    Attack(
        "makes a device",
        "import stat\nos.mknod('disk', 0o600 | stat.S_IFBLK, os.makedev(254, 0)); os.unlink('disk'); breach()",
        opens="root",
    ),
    Attack("changes its root directory", "os.chroot('.'); breach()", opens="root"),
    Attack("opens a new file system", "if call(430, b'tmpfs', 0)[0] >= 0: breach()", opens="root"),
    Attack("mounts and unmounts", "libc.mount(b'x', b'.', b'tmpfs', 0, None) or breach()", is_harmful=True),
]

LEFTOVERS = [
    Attack(
        "finds the files of another solution",
        "if os.path.exists(host['leftover']): breach()",
        first="open(host['leftover'], 'w').write('x')",
    ),
    Attack(
        "finds its own files of the previous run",
        "if os.listdir('.') + os.listdir('/dev/shm'): breach(os.listdir('.'))",
        opens="",
        first="open('mark', 'w').write('x'); open('/dev/shm/mettle-mark', 'w').write('x'); os.unlink('/dev/shm/mettle-mark')",
    ),
    Attack(
        "leaves a process behind",
        "import time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0: libc.prctl(15, b'mettle-straggler', 0, 0, 0); time.sleep(30)\n"
        "    os._exit(0)\n"
        "time.sleep(0.05)",
        opens="",
    ),
]

SECRETS = [
    Attack("reads its own environment", "if host['token_name'] in os.environ: breach()", opens=""),
    Attack(
        "reads the environment of others",
        "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    try: data = open(f'/proc/{pid}/environ', 'rb').read()\n"
        "    except OSError: continue\n"
        "    if b'METTLE_ATTACK_TOKEN=' in data: breach(pid)",
    ),
    Attack(
        "reads the command lines of others",
        "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    try: data = open(f'/proc/{pid}/cmdline', 'rb').read()\n"
        "    except OSError: continue\n"
        "    if b'mettle-decoy' in data: breach(pid)",
    ),
    Attack("reads the environment of process 1 above it", "open(f'/proc/{os.getppid()}/environ').read(); breach()"),
    Attack("lists the descriptors of process 1 above it", "os.listdir(f'/proc/{os.getppid()}/fd'); breach()"),
    Attack("opens the memory of process 1 above it", "open(f'/proc/{os.getppid()}/mem', 'rb'); breach()"),
    Attack(
        "holds descriptors that it should not",
        "import fcntl\nfor fd in range(3, 300):\n    if works(fcntl.fcntl, fd, fcntl.F_GETFD): breach(fd)",
        opens="",
    ),
]

PROCESSES = [
    Attack("sees the host's processes", "if len([p for p in os.listdir('/proc') if p.isdigit()]) > 3: breach()"),
    Attack("kills a process of the host", "os.kill(host['decoy_pid'], 9); breach()"),
    Attack(
        "signals process 1 above it",
        "import time\n"
        "for number in (1, 2, 3, 6, 10, 13, 14, 15, 9): works(os.kill, os.getppid(), number)\n"
        "time.sleep(0.05); print('alive')",
    ),
    Attack("stops process 1 above it", "os.kill(os.getppid(), 19); print('alive')", is_harmful=True),
    Attack("kills everything in sight", "os.kill(-1, 9); print('alive')", is_harmful=True),
    Attack(
        "traces a process",
        "if any(call(101, 0x4206, pid, 0, 0)[0] == 0 for pid in (host['decoy_pid'], os.getppid())): breach()",
    ),
    Attack(
        "reads another process's memory by system call",
        "buffer = ctypes.create_string_buffer(8)\n"
        "class Span(ctypes.Structure): _fields_ = [('p', ctypes.c_void_p), ('n', ctypes.c_size_t)]\n"
        "span = Span(ctypes.addressof(buffer), 8)\n"
        "if call(310, os.getppid(), ctypes.byref(span), 1, ctypes.byref(span), 1, 0)[0] == 8: breach()",
    ),
    Attack(
        "takes a descriptor from another process",
        "fd = os.pidfd_open(os.getppid())\nif call(438, fd, 0, 0)[0] >= 0: breach()",
    ),
    Attack(
        "changes the limits of process 1",
        "import resource\nresource.prlimit(os.getppid(), resource.RLIMIT_CORE, (0, 0)); breach()",
    ),
    Attack("changes the priority of process 1", "os.setpriority(os.PRIO_PROCESS, os.getppid(), 5); breach()"),
    Attack("binds process 1 to a processor", "os.sched_setaffinity(os.getppid(), os.sched_getaffinity(0)); breach()"),
    Attack(
        "compares kernel objects of processes", "if call(312, os.getpid(), os.getppid(), 0, 0, 0)[0] >= 0: breach()"
    ),
    Attack(
        "forks without end",
        "import time\nn = 0\n"
        "for _ in range(100):\n"
        "    try: pid = os.fork()\n"
        "    except OSError: break\n"
        "    if pid == 0: time.sleep(5); os._exit(0)\n"
        "    n += 1\n"
        "if n > 16: breach(n)",
    ),
    Attack(
        "starts threads without end",
        "import threading, time\nthreading.stack_size(65536)\nn = 0\n"
        "try:\n"
        "    for n in range(100): threading.Thread(target=time.sleep, args=(0.3,), daemon=True).start()\n"
        "except RuntimeError: pass\n"
        "if n > 20: breach(n)",
    ),
]

RESOURCES = [
    Attack(
        "takes memory that limits do not count",
        "fd, _ = call(319, b'x', 0)\nif fd >= 0: os.ftruncate(fd, 1 << 20); breach()",
    ),
    Attack(
        "takes shared memory that outlives it",
        "shm, _ = call(29, 0, 1 << 20, 0o1600)\nif shm >= 0: call(31, shm, 0, 0); breach()",
    ),
    Attack(
        "opens a message queue",
        "fd, _ = call(240, b'mettle', os.O_CREAT | os.O_RDWR, 0o600, 0)\nif fd >= 0: call(241, b'mettle'); breach()",
    ),
    Attack(
        "fills the disk",
        "n = 0\n"
        "try:\n"
        "    for number in range(12):\n"
        "        with open(f'f{number}', 'wb') as file:\n"
        "            for _ in range(8): n += file.write(bytes(1 << 20))\n"
        "except OSError: pass\n"
        "if n > 64 << 20: breach(n)",
    ),
    Attack(
        "makes files without end",
        "n = 0\n"
        "try:\n"
        "    for n in range(1300): os.close(os.open(f'f{n}', os.O_CREAT))\n"
        "except OSError: pass\n"
        "if n > 1100: breach(n)",
    ),
    Attack(
        "opens descriptors without end",
        "n = 0\ntry:\n    for n in range(2000): os.dup(0)\nexcept OSError: pass\nif n > 300: breach(n)",
        opens="",
    ),
    Attack(
        "nests directories beyond reason",
        "for _ in range(3000): os.mkdir('d'); os.chdir('d')\n",
        opens="",
    ),
    Attack(
        "raises its limits",
        "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1 << 40, 1 << 40)); breach()",
        opens="",
    ),
    Attack(
        "protects itself from the out-of-memory killer",
        "open('/proc/self/oom_score_adj', 'w').write('-1000'); breach()",
        opens="root",
    ),
]

NETWORK = [
    Attack(
        "connects to a service of the host",
        "s = socket.create_connection(('127.0.0.1', host['port']), 1); breach()",
    ),
    Attack(
        "connects to an abstract socket of the host",
        "s = socket.socket(socket.AF_UNIX); s.connect('\\0' + host['abstract']); breach()",
    ),
    Attack(
        "sends to an abstract socket of the host from a pair",
        "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "a.sendto(b'x', '\\0' + host['abstract_datagram']); breach()",
    ),
    Attack(
        "reaches the internet and the cloud's metadata",
        "for address in (('169.254.169.254', 80), ('1.1.1.1', 443)):\n"
        "    if works(socket.create_connection, address, 0.3): breach(address)\n"
        "if works(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('8.8.8.8', 53))): breach()",
        is_harmful=True,
    ),
    *(
        Attack(f"opens a {name} socket", f"if call(41, {family}, {kind}, 0)[0] >= 0: breach()")
        for name, family, kind in (("netlink", 16, 3), ("vsock", 40, 1), ("IPv6", 10, 1), ("UDP", 2, 2))
    ),
    Attack("opens a packet socket", "if call(41, 17, 3, 0)[0] >= 0: breach()", opens="root"),
    Attack("pairs sockets of another family", "if answered(53, 16, 3, 0, ctypes.create_string_buffer(8)): breach()"),
]

KERNEL = [
    Attack("makes a user namespace", "if call(272, 0x10000000)[0] == 0: breach()"),
    Attack(
        "clones into a user namespace",
        "result, _ = call(56, 0x10000000 | 17, 0, 0, 0, 0)\nif result == 0: os._exit(0)\nif result > 0: breach()",
    ),
    Attack(
        "clones into a user namespace by the newer call",
        "arguments = (ctypes.c_uint64 * 11)(0x10000000, 0, 0, 0, 17)\n"
        "result, _ = call(435, ctypes.byref(arguments), 88)\n"
        "if result == 0: os._exit(0)\n"
        "if result > 0: breach()",
    ),
    Attack(
        "enters another namespace",
        "if answered(308, os.open('/proc/self/ns/uts', os.O_RDONLY), 0): breach()",
        opens="root",
    ),
    Attack("becomes root", "os.setuid(0); breach()", opens="root"),
    Attack(
        "holds capabilities",
        "caps = [line for line in open('/proc/self/status') if line.startswith('CapEff')][0]\n"
        "if int(caps.split()[1], 16): breach(caps)",
        opens="root",
    ),
    Attack(
        "gains privileges by running a program",
        "if not any(line.split() == ['NoNewPrivs:', '1'] for line in open('/proc/self/status')): breach()",
    ),
    Attack("stores a key in the kernel's keyring", "if call(248, b'user', b'mettle', b'x', 1, -2)[0] >= 0: breach()"),
    Attack("uses io_uring", "if answered(425, 0, 0): breach()"),
    Attack("uses bpf", "if answered(321, 0, 0, 0): breach()", opens="root"),
    Attack("uses userfaultfd", "if answered(323, 1): breach()"),
    Attack("uses performance counters", "if answered(298, 0, 0, -1, -1, 0): breach()"),
    Attack("makes secret memory", "if answered(447, 1 << 30): breach()", opens=""),
    Attack("unloads a kernel module", "if answered(176, 0, 0): breach()", opens=""),
    Attack("sets the clock", "if answered(227, 0, 0): breach()"),
    Attack(
        "names the host",
        "name = os.uname().nodename.encode()\nif call(170, name, len(name))[0] == 0: breach()",
        opens="root",
    ),
    Attack("reads the kernel's log", "if call(103, 10, 0, 0)[0] >= 0: breach()", opens="root"),
    Attack("changes its execution domain", "if call(135, 0x0040000)[0] >= 0: breach()"),
    Attack("calls through the x32 table", "if call(0x40000000 | 39)[0] >= 0: breach()", opens=""),
    Attack(
        "types into a terminal",
        "import fcntl\nmaster, slave = os.openpty(); fcntl.ioctl(slave, 0x5412, b'x'); breach()",
        opens="root",
    ),
    Attack(
        "types into a stream by number",
        "if answered(16, 0, 0x5412, b'x') and ctypes.get_errno() != 25: breach()",
        opens="",
    ),
    Attack(
        "opens the kernel's controls for writing",
        "for path in ('/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', '/proc/sys/vm/drop_caches'):\n"
        "    if works(lambda: os.close(os.open(path, os.O_WRONLY))): breach(path)",
        opens="root",
    ),
    Attack(
        "dumps core",
        "import resource\nif resource.getrlimit(resource.RLIMIT_CORE)[1] > 1: breach()\nos.abort()",
        opens="",
    ),
]

ATTACKS = [*FILES, *LEFTOVERS, *SECRETS, *PROCESSES, *RESOURCES, *NETWORK, *KERNEL]
