"""Attacks by taking more than there is: memory, disk, descriptors, kernel objects."""

from __future__ import annotations

from attack import Attack, group

RESOURCES = group(
    "the host holds no more than the limits say, and nothing of it afterwards",
    [
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
            off="a limit of the process holds there, too",
        ),
        Attack(
            "nests directories beyond reason",
            "for _ in range(3000): os.mkdir('d'); os.chdir('d')\n",
            opens="",
            off="it gets nothing by it; the directory must be removed all the same",
        ),
        Attack(
            "raises its limits",
            "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1 << 40, 1 << 40)); breach()",
            opens="",
            off="only root may, and root's limits here are the host's own",
        ),
        Attack(
            "protects itself from the out-of-memory killer",
            "open('/proc/self/oom_score_adj', 'w').write('-1000'); breach()",
            opens="root",
        ),
        Attack(
            "shares memory that no process needs to map",
            "import mmap\nmmap.mmap(-1, 1 << 20); breach()",
        ),
        Attack(
            "takes the host's huge pages",
            "libc.mmap.restype = ctypes.c_void_p\n"
            "if libc.mmap(None, ctypes.c_size_t(2 << 20), 3, 0x40022, -1, 0) not in (None, (1 << 64) - 1): breach()",
            opens="",
            off="this host sets no huge pages aside",
        ),
        Attack(
            "makes its pipes larger",
            "import fcntl\nr, w = os.pipe(); fcntl.fcntl(w, 1031, 1 << 20)\n"
            "if fcntl.fcntl(w, 1032) > 1 << 16: breach()",
        ),
        Attack(
            "makes its sockets larger",
            "a, b = socket.socketpair()\nbefore = a.getsockopt(1, 7)\na.setsockopt(1, 7, 3 << 20)\n"
            "if a.getsockopt(1, 7) > before: breach()",
        ),
        Attack(
            "uses up the file watches of its user",
            "n = 0\n"
            "try:\n"
            "    for n in range(100):\n"
            "        if libc.inotify_init() < 0: break\n"
            "except OSError: pass\n"
            "if n > 50: breach(n)",
        ),
        Attack(
            "piles up signals",
            "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN + 1})\n"
            "info = ctypes.create_string_buffer(128); ctypes.memmove(info, b'\\0' * 8 + b'\\xff' * 4, 12)\n"
            "n = 0\n"
            "for n in range(4000):\n"
            "    if call(129, os.getpid(), signal.SIGRTMIN + 1, ctypes.byref(info))[0] < 0: break\n"
            "if n > 1500: breach(n)",
        ),
    ],
)
