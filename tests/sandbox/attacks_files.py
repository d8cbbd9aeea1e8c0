"""Attacks on files, on what another solution left, and on secrets."""

from __future__ import annotations

from attack import Attack, group

FILES = group(
    "no file of the host was read, made or changed",
    [
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
        Attack(
            "mounts and unmounts",
            "libc.mount(b'x', b'.', b'tmpfs', 0, None) or breach()",
            is_harmful=True,
            off="it would change the host",
        ),
        Attack(
            "makes a device that needs no privilege",
            "import stat\nos.mknod('whiteout', 0o600 | stat.S_IFCHR, 0); os.unlink('whiteout'); breach()",
        ),
        Attack(
            "reads about the host's kernel in /proc",
            "for name in ('config.gz', 'cmdline', 'interrupts', 'timer_list', 'kallsyms', 'keys', 'kcore', 'modules'):\n"
            "    try: data = open('/proc/' + name, 'rb').read(64)\n"
            "    except OSError: continue\n"
            "    if data: breach(name)",
        ),
        Attack(
            "connects to a socket in a directory of the host",
            "s = socket.socket(socket.AF_UNIX); s.connect(host['socket_file']); breach()",
        ),
        Attack("reads what the host calls itself", "if os.uname().nodename == host['nodename']: breach()"),
        Attack(
            "holds a file with a lease",
            "import fcntl\nf = open('leased', 'w'); fcntl.fcntl(f, fcntl.F_SETLEASE, fcntl.F_WRLCK); breach()",
        ),
        Attack(
            "hears when the host opens its programs",
            "watcher = libc.inotify_init()\n"
            "if watcher >= 0 and libc.inotify_add_watch(watcher, b'/usr/bin', 0x20) >= 0: breach()",
        ),
        Attack(
            "keeps the host from locking its own files",
            "import fcntl\nfcntl.flock(os.open('/usr/bin/env', os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB); breach()",
        ),
        Attack(
            "maps a device that gives memory",
            "import mmap\nmmap.mmap(os.open('/dev/zero', os.O_RDWR), 1 << 20); breach()",
        ),
    ],
)

LEFTOVERS = group(
    "nothing of one execution is seen by the next, and none of its processes lives",
    [
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
            off="each run has an empty directory there, too",
        ),
        Attack(
            "leaves a process behind",
            "import time\n"
            "if os.fork() == 0:\n"
            "    os.setsid()\n"
            "    if os.fork() == 0: libc.prctl(15, host['straggler'].encode(), 0, 0, 0); time.sleep(30)\n"
            "    os._exit(0)\n"
            "time.sleep(0.05)",
            opens="",
            off="process 1 of a test hunts for descendants there, too",
        ),
    ],
)

SECRETS = group(
    "no secret of the host's, and nothing of process 1's, was read",
    [
        Attack(
            "reads its own environment",
            "if host['token_name'] in os.environ: breach()",
            opens="",
            off="the environment is written anew there, too",
        ),
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
            off="descriptors are closed there, too",
        ),
    ],
)
