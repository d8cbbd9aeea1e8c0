"""Attacks from one machine on the host and on another machine, as programs that print BREACH if they got through.

The attacks on cells run in machines, too, except for `ALLOWED_INSIDE`: what a test may not do and a machine may, because
it happens in a network and on a file system of the machine's own. `NEIGHBOUR` ones get the description of another
machine of the same pool, in which there are a file, a process, a server and an abstract socket.
"""

from __future__ import annotations

import shutil

from attack import Attack, group
from attacks import ATTACKS

ALLOWED_INSIDE = {
    "opens a IPv6 socket": "its network is its own",
    "opens a UDP socket": "its network is its own",
    "listens where others of the host would connect": "its network is its own",
    "claims an abstract name of the host": "its network is its own, and with it all such names",
    "opens devices": "it has terminals of its own; the host's devices are tried below",
    "writes among the system's files": "its root is its own; what the host lends it is tried below",
    "finds its own files of the previous run": "its files are its own until it ends",
    "makes files without end": "it may have more; its limit is tried below",
    "opens descriptors without end": "it may have more",
    "kills everything in sight": "that is its right; process 1 stays",
    "writes to the host's store of randomness": "its whole root is writable to Landlock; the kernel counts nothing of it",
    "hears when the host opens its programs": "tools that wait for changes need watches; it hears of /usr, by name",
    "keeps the host from locking its own files": "package managers lock; of the host's it can lock what it can read",
}
"""What a test may not do and a machine may, and why."""

SHARED = [attack for attack in ATTACKS if attack.name not in ALLOWED_INSIDE]

OWN = group(
    "the host has nothing of what the machine did, and the machine takes more commands",
    [
        Attack(
            "writes to what the host lent it",
            "for where in ('/usr', '/usr/bin', '/etc', '/dev', '/proc', os.path.dirname(os.__file__)):\n"
            "    path = where + '/.mettle-attack'\n"
            "    if works(lambda: os.close(os.open(path, os.O_CREAT | os.O_WRONLY))):\n"
            "        os.unlink(path); breach(where)\n",
            opens="root",
        ),
        Attack(
            "opens the host's devices",
            "for name in ('kmsg', 'mem', 'vda', 'kvm', 'fuse', 'loop-control', 'vsock'):\n"
            "    if works(lambda: os.close(os.open('/dev/' + name, os.O_RDONLY | os.O_NONBLOCK))): breach(name)",
        ),
        Attack(
            "makes more files than it may have",
            "n = 0\n"
            "try:\n"
            "    for n in range(6000): os.close(os.open(f'f{n}', os.O_CREAT))\n"
            "except OSError: pass\n"
            "if n > 4500: breach(n)",
        ),
        Attack(
            "looks into the processes that serve it",
            "def is_mine(pid):\n"
            "    try: return os.stat(f'/proc/{pid}/fd').st_uid == os.getuid() and os.listdir(f'/proc/{pid}/fd')\n"
            "    except OSError: return False\n"
            "above = [1, os.getppid()]\n"
            "for pid in above:\n"
            "    for name in ('mem', 'environ', 'fd/0', 'maps'):\n"
            "        if works(lambda: os.close(os.open(f'/proc/{pid}/{name}', os.O_RDONLY | os.O_NONBLOCK))):\n"
            "            breach(pid, name)",
        ),
        Attack(
            "opens an unusual protocol",
            "for kind, protocol in ((1, 132), (1, 262), (5, 132), (2, 136), (3, 6)):\n"
            "    if call(41, 2, kind, protocol)[0] >= 0: breach(protocol)",
        ),
        Attack(
            "has a way out of its network",
            "names = sorted(os.listdir('/sys/class/net')) if os.path.isdir('/sys/class/net') else "
            "[line.split(':')[0].strip() for line in open('/proc/net/dev').readlines()[2:]]\n"
            "if names != ['lo']: breach(names)",
        ),
        Attack(
            "compiles a program that makes a user namespace",
            "import shutil, subprocess\n"
            "code = '#define _GNU_SOURCE\\n#include <sched.h>\\nint main(){return unshare(CLONE_NEWUSER)!=0;}'\n"
            "open('own.c', 'w').write(code)\n"
            "compiler = shutil.which('cc') or shutil.which('gcc')\n"
            "if compiler and subprocess.run([compiler, '-o', 'own', 'own.c']).returncode == 0:\n"
            "    if subprocess.run(['./own']).returncode == 0: breach()",
            opens="any" if shutil.which("cc") or shutil.which("gcc") else "",
            off="this host has no compiler",
        ),
        Attack(
            "makes TCP load a module",
            "s = socket.create_server(('127.0.0.1', 0)); c = socket.create_connection(s.getsockname())\n"
            "if call(54, c.fileno(), 6, 31, b'tls', 3)[0] == 0 or ctypes.get_errno() == errno.ENOENT: breach()",
        ),
        Attack(
            "goes to the neighbours of the host's network",
            "for to in (host['port'], 22, 80):\n"
            "    for address in ('127.0.0.1', '10.0.2.2', '172.17.0.1', '169.254.169.254'):\n"
            "        if works(socket.create_connection, (address, to), 0.2): breach(address, to)",
        ),
    ],
)

NEIGHBOUR = group(
    "the other machine, its files, processes and sockets are as they were",
    [
        Attack(
            "finds a file of another machine",
            "import glob\n"
            "near = os.path.dirname(os.path.dirname(os.getcwd()))\n"
            "for directory in {host['directory'], '/work', '/tmp', '/dev/shm', *glob.glob(near + '/*/work')}:\n"
            "    if os.path.exists(directory + '/' + host['file']): breach(directory)",
        ),
        Attack(
            "sees a process of another machine",
            "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
            "    try: data = open(f'/proc/{pid}/cmdline', 'rb').read()\n"
            "    except OSError: continue\n"
            "    if host['process'].encode() in data: breach(pid)",
        ),
        Attack(
            "kills a process of another machine",
            "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
            "    try: data = open(f'/proc/{pid}/cmdline', 'rb').read()\n"
            "    except OSError: continue\n"
            "    if host['process'].encode() in data: os.kill(int(pid), 9); breach(pid)\n"
            "for pid in range(2, 400):\n"
            "    if pid not in (os.getpid(), os.getppid()) and not os.path.exists('/var/lib'): works(os.kill, pid, 9)",
        ),
        Attack(
            "connects to a server of another machine",
            "socket.create_connection(('127.0.0.1', host['server']), 1); breach()",
        ),
        Attack(
            "connects to an abstract socket of another machine",
            "socket.socket(socket.AF_UNIX).connect('\\0' + host['name']); breach()",
        ),
        Attack(
            "meets another machine in shared memory",
            "if os.path.exists('/dev/shm/' + host['name']): breach()",
        ),
    ],
)
