"""Attacks on the kernel: calls that an ordinary program never makes."""

from __future__ import annotations

from attack import Attack, group

_NOT_BUILT_IN = "many kernels are built without it, and only root may"

KERNEL = group(
    "the kernel refused the call before it looked at it",
    [
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
        Attack(
            "stores a key in the kernel's keyring", "if call(248, b'user', b'mettle', b'x', 1, -2)[0] >= 0: breach()"
        ),
        Attack("uses io_uring", "if answered(425, 0, 0): breach()"),
        Attack("uses bpf", "if answered(321, 0, 0, 0): breach()", opens="root"),
        Attack("uses userfaultfd", "if answered(323, 1): breach()"),
        Attack("uses performance counters", "if answered(298, 0, 0, -1, -1, 0): breach()"),
        Attack(
            "makes secret memory",
            "if answered(447, 1 << 30): breach()",
            opens="",
            off="the kernel has it switched off by default",
        ),
        Attack(
            "unloads a kernel module",
            "if answered(176, 0, 0): breach()",
            opens="",
            off="only root may, and this is not tried in earnest",
        ),
        Attack("sets the clock", "if answered(227, 0, 0): breach()"),
        Attack(
            "names the host",
            "name = os.uname().nodename.encode()\nif call(170, name, len(name))[0] == 0: breach()",
            opens="root",
        ),
        Attack("reads the kernel's log", "if call(103, 10, 0, 0)[0] >= 0: breach()", opens="root"),
        Attack("changes its execution domain", "if call(135, 0x0040000)[0] >= 0: breach()"),
        Attack(
            "calls through the x32 table",
            "if call(0x40000000 | 39)[0] >= 0: breach()",
            opens="",
            off="most kernels are built without it",
        ),
        Attack(
            "types into a terminal",
            "import fcntl\nmaster, slave = os.openpty(); fcntl.ioctl(slave, 0x5412, b'x'); breach()",
            opens="root",
        ),
        Attack(
            "types into a stream by number",
            "if answered(16, 0, 0x5412, b'x') and ctypes.get_errno() != 25: breach()",
            opens="",
            off="there is no terminal to type into",
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
            off="a limit of the process holds there, too",
        ),
        Attack(
            "makes any other namespace",
            "for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x20000000, 0x40000000, 0x80):\n"
            "    if call(272, 0x10000000 | flag)[0] == 0: breach(flag); break",
        ),
        Attack("opens a tree of mounts", "if call(428, -100, b'/', 0)[0] >= 0: breach()"),
        Attack("picks a mounted file system", "if answered(433, -100, b'/', 0): breach()", opens="root"),
        Attack("moves a mount", "if answered(429, -100, b'/', -100, b'/', 0): breach()", opens="root"),
        Attack(
            "changes the attributes of a mount",
            "attributes = (ctypes.c_uint64 * 4)()\nif answered(442, -100, b'/', 0, ctypes.byref(attributes), 32): breach()",
            opens="root",
        ),
        Attack("loads another kernel", "if answered(246, 0, 0, 0, 1 << 40): breach()", opens="", off=_NOT_BUILT_IN),
        Attack("restarts the host", "if answered(169, 1, 1, 1, 0): breach()", opens="root"),
        Attack("changes the segments of its processor", "if answered(154, 0, 0, 0): breach()"),
        Attack("takes the processor's ports", "if call(172, 3)[0] == 0: breach()", opens="", off=_NOT_BUILT_IN),
        Attack("watches all files of a mount", "if answered(300, 0x200, 0): breach()"),
        Attack("sets where its memory lies", "if answered(238, 0, 0, 0): breach()"),
        Attack("asks another keyring for a key", "if answered(249, b'user', b'mettle', 0, 0): breach()"),
        Attack("joins a keyring", "if answered(250, 1, 0): breach()"),
        Attack("takes page faults by a device", "os.open('/dev/userfaultfd', os.O_RDWR); breach()", opens="root"),
        Attack(
            "enters and registers rings", "if answered(426, -1, 0, 0, 0, 0, 0) or answered(427, -1, 0, 0, 0): breach()"
        ),
        Attack("moves memory of the kernel's through pipes", "if answered(278, -1, 0, 0, 0): breach()"),
        Attack("asks for handles of files", "if answered(303, -100, b'/usr', 0, 0, 0): breach()"),
        Attack("changes its groups", "os.setgroups([0]); breach()", opens="root"),
        Attack(
            "could regain a capability",
            "if any(libc.prctl(23, number, 0, 0, 0) == 1 for number in range(64)): breach()",
        ),
        Attack(
            "changes the discipline of a terminal line",
            "import fcntl\nmaster, slave = os.openpty()\nfcntl.ioctl(slave, 0x5423, b'\\0\\0\\0\\0'); breach()",
        ),
        Attack(
            "writes to the host's store of randomness",
            "with open('/dev/urandom', 'wb') as pool: pool.write(b'x')\nbreach()",
        ),
    ],
)
