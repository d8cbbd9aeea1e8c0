"""Attacks on other processes, and by the number of processes."""

from __future__ import annotations

from attack import Attack, group

PROCESSES = group(
    "no process outside was seen, touched or ended, and process 1 serves on",
    [
        Attack("sees the host's processes", "if len([p for p in os.listdir('/proc') if p.isdigit()]) > 3: breach()"),
        Attack("kills a process of the host", "os.kill(host['decoy_pid'], 9); breach()"),
        Attack(
            "signals process 1 above it",
            "import time\n"
            "for number in (1, 2, 3, 6, 10, 13, 14, 15, 9): works(os.kill, os.getppid(), number)\n"
            "time.sleep(0.05); print('alive')",
        ),
        Attack(
            "stops process 1 above it",
            "os.kill(os.getppid(), 19); print('alive')",
            is_harmful=True,
            off="it would stop the pool's own process",
        ),
        Attack(
            "kills everything in sight",
            "os.kill(-1, 9); print('alive')",
            is_harmful=True,
            off="it would end the tests themselves",
        ),
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
        Attack(
            "binds process 1 to a processor", "os.sched_setaffinity(os.getppid(), os.sched_getaffinity(0)); breach()"
        ),
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
            "    for n in range(100): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
            "except RuntimeError: pass\n"
            "if n > 20: breach(n)",
        ),
        Attack(
            "leaves a process that ignores every signal",
            "import signal, time\n"
            "if os.fork() == 0:\n"
            "    for n in set(range(1, 65)) - {9, 19, 32, 33}: signal.signal(n, signal.SIG_IGN)\n"
            "    libc.prctl(15, host['straggler'].encode(), 0, 0, 0); os.setsid(); time.sleep(30); os._exit(0)\n"
            "time.sleep(0.05); os.kill(0, 15)",
            opens="",
            off="process 1 of a test hunts for descendants there, too",
        ),
        Attack(
            "leaves a stopped process",
            "import time\n"
            "if os.fork() == 0: libc.prctl(15, host['straggler'].encode(), 0, 0, 0); os.setsid(); os.kill(os.getpid(), 19)\n"
            "time.sleep(0.05)",
            opens="",
            off="process 1 of a test hunts for descendants there, too",
        ),
        Attack(
            "leaves a process that is its parent's sibling",
            "import time\n"
            "result, _ = call(56, 0x8000 | 17, 0, 0, 0, 0)\n"
            "if result == 0: libc.prctl(15, host['straggler'].encode(), 0, 0, 0); os.setsid(); time.sleep(30); os._exit(0)\n"
            "time.sleep(0.05)",
            opens="",
            off="process 1 of a test hunts for descendants there, too",
        ),
        Attack(
            "ends a process of the host by its descriptor",
            "fd = os.pidfd_open(host['decoy_pid'])\nif call(424, fd, 9, 0, 0)[0] == 0: breach()",
        ),
        Attack(
            "writes another process's memory by system call",
            "buffer = ctypes.create_string_buffer(8)\n"
            "class Span(ctypes.Structure): _fields_ = [('p', ctypes.c_void_p), ('n', ctypes.c_size_t)]\n"
            "span = Span(ctypes.addressof(buffer), 8)\n"
            "if call(311, os.getpid(), ctypes.byref(span), 1, ctypes.byref(span), 1, 0)[0] == 8: breach()",
        ),
        Attack("lets its parent trace it", "if call(101, 0, 0, 0, 0)[0] == 0: breach()"),
        Attack(
            "advises another process's memory", "if answered(440, os.pidfd_open(os.getpid()), 0, 0, 4, 0): breach()"
        ),
        Attack("moves its pages between nodes of memory", "if answered(256, 0, 0, 0, 0): breach()"),
        Attack("watches its children's calls", "if answered(317, 3, 0, 0): breach()"),
    ],
)
