"""Programs that take memory in ways that no process's size shows, and print how much of it they hold, in MB.

Each takes up to what is given on its command line, a few MB at a time, then keeps all of it for a moment. A machine or
a test is held to its limit if the last number that is printed is not far above it.
"""

from __future__ import annotations

_HEAD = """
import ctypes, mmap, os, signal, socket, sys, time
goal = int(sys.argv[1]) if len(sys.argv) > 1 else 320
held = []
def say(mb): print(int(mb), flush=True)
"""

_SLICES = """
for part in range(0, goal, 8):
    pid = os.fork()
    if pid == 0:
        for position in range(part << 20, min(part + 8, goal) << 20, 4096): memory[position] = 1
        os._exit(0)
    if os.waitpid(pid, 0)[1]: raise SystemExit("a child was ended")
    say(part + 8)
time.sleep(0.6)
say(goal)
"""

HIDDEN_MEMORY = {
    "a shared mapping, filled by children that end": _HEAD + "memory = mmap.mmap(-1, goal << 20)\n" + _SLICES,
    "a mapping of /dev/zero, filled by children that end": _HEAD
    + "memory = mmap.mmap(os.open('/dev/zero', os.O_RDWR), goal << 20)\n"
    + _SLICES,
    "a file in memory without a name": _HEAD
    + "file = os.memfd_create('x')\n"
    + "for mb in range(8, goal + 1, 8): os.write(file, bytes(8 << 20)); say(mb)\n"
    + "time.sleep(0.6); say(goal)\n",
    "buffers of local sockets": _HEAD
    + "mb, one = 0, bytes(1 << 16)\n"
    + "def fill():\n"
    + "    global mb\n"
    + "    a, b = socket.socketpair()\n"
    + "    held.extend((a, b))\n"
    + "    for end in (a, b):\n"
    + "        end.setsockopt(1, 7, 8 << 20); end.setblocking(False)\n"
    + "        try:\n"
    + "            while mb < goal: mb += end.send(one) / (1 << 20)\n"
    + "        except BlockingIOError: pass\n"
    + "try:\n"
    + "    while mb < goal: fill(); say(mb)\n"
    + "except OSError: pass\n"
    + "time.sleep(0.6); say(mb)\n",
    "buffers of TCP connections": _HEAD
    + "mb, one = 0, bytes(1 << 16)\n"
    + "server = socket.create_server(('127.0.0.1', 0), backlog=64)\n"
    + "while mb < goal:\n"
    + "    a = socket.create_connection(server.getsockname()); b = server.accept()[0]; held += [a, b]\n"
    + "    for end in (a, b):\n"
    + "        end.setblocking(False); until = time.monotonic() + 0.03\n"
    + "        while time.monotonic() < until and mb < goal:\n"
    + "            try: mb += end.send(one) / (1 << 20)\n"
    + "            except BlockingIOError: time.sleep(0.005)\n"
    + "    say(mb)\n"
    + "time.sleep(0.6); say(mb)\n",
    "buffers of pipes": _HEAD
    + "mb, one = 0, bytes(1 << 16)\n"
    + "def more():\n"
    + "    global mb\n"
    + "    r, w = os.pipe()\n"
    + "    try:\n"
    + "        import fcntl; fcntl.fcntl(w, 1031, 1 << 20)\n"
    + "    except OSError: pass\n"
    + "    os.set_blocking(w, False)\n"
    + "    try:\n"
    + "        while True: mb += os.write(w, one) / (1 << 20)\n"
    + "    except BlockingIOError: pass\n"
    + "    os.close(w)\n"
    + "for _ in range(12):\n"
    + "    try:\n"
    + "        while mb < goal: more(); say(mb)\n"
    + "    except OSError:\n"
    + "        sys.stdout.flush()\n"
    + "        if os.fork(): time.sleep(3); break\n"
    + "        os.closerange(3, 5000)\n"
    + "    else: break\n"
    + "time.sleep(0.6); say(mb)\n",
    "mappings without memory, copied by forks": _HEAD
    + "libc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p\n"
    + "mb = each = 0\n"
    + "def map_one(): return libc.mmap(None, ctypes.c_size_t(4096), 1 + 2 * (each & 1), 0x22, -1, 0)\n"
    + "while each < 64000 and map_one() not in (None, (1 << 64) - 1): each += 1\n"
    + "def check():\n"
    + "    if held and os.waitpid(-1, os.WNOHANG)[0]: raise SystemExit('a child was ended')\n"
    + "try:\n"
    + "    while mb < goal:\n"
    + "        pid = os.fork()\n"
    + "        if pid == 0: time.sleep(1.2); os._exit(0)\n"
    + "        held.append(pid); check(); mb += each * 224 / (1 << 20); say(mb)\n"
    + "except OSError: pass\n"
    + "time.sleep(0.6); check(); say(mb)\n",
    "pages, beside a process that forks without end": _HEAD
    + "libc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p\n"
    + "try: storm = os.fork()\n"
    + "except OSError: raise SystemExit('no processes here')\n"
    + "if storm == 0:\n"
    + "    signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
    + "    for each in range(60000): libc.mmap(None, ctypes.c_size_t(4096), 1 + 2 * (each & 1), 0x22, -1, 0)\n"
    + "    while os.getppid() != 1:\n"
    + "        if os.fork() == 0: os._exit(0)\n"
    + "    os._exit(0)\n"
    + "time.sleep(0.3)\n"
    + "for mb in range(8, goal + 1, 8): held.append(bytearray(b'x' * (8 << 20))); say(mb); time.sleep(0.02)\n"
    + "time.sleep(0.6); say(goal); os.kill(storm, 9)\n",
    "page tables": _HEAD
    + "libc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p\n"
    + "mb, sink = 0, ctypes.create_string_buffer(1)\n"
    + "while mb < goal:\n"
    + "    area = libc.mmap(None, ctypes.c_size_t(4 << 30), 1, 0x4022, -1, 0)\n"
    + "    if area in (None, (1 << 64) - 1): break\n"
    + "    libc.madvise(ctypes.c_void_p(area), ctypes.c_size_t(4 << 30), 15)\n"
    + "    for position in range(area, area + (4 << 30), 2 << 20): ctypes.memmove(sink, position, 1)\n"
    + "    mb += 8; say(mb)\n"
    + "time.sleep(0.6); say(mb)\n",
}
