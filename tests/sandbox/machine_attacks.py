"""Attacks from one machine on the host and on another machine, as programs that print BREACH if they got through.

The attacks on cells run in machines, too, except for `ALLOWED_INSIDE`: what a test may not do and a machine may, because
it happens in a network and on a file system of the machine's own. `NEIGHBOUR` ones get the description of another
machine of the same pool, in which there are a file, a process, a server and an abstract socket.
"""

from __future__ import annotations

from attacks import ATTACKS, Attack

ALLOWED_INSIDE = {
    "opens a IPv6 socket",
    "opens a UDP socket",
    "opens devices",  # pseudo-terminals of its own
    "writes among the system's files",  # its root is its own; the rest is tried below
    "finds its own files of the previous run",
    "makes files without end",  # up to a limit that is tried below
    "opens descriptors without end",
    "kills everything in sight",  # that is its right; process 1 stays
}
SHARED = [attack for attack in ATTACKS if attack.name not in ALLOWED_INSIDE]

OWN = [
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
]

NEIGHBOUR = [
    Attack(
        "finds a file of another machine",
        "for directory, _, names in os.walk('/tmp'):\n"
        "    if host['file'] in names: breach(directory)\n"
        "if os.path.exists('/work/' + host['file']) or os.path.exists('/dev/shm/' + host['file']): breach()",
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
]
