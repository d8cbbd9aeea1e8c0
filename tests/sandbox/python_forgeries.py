"""Programs and functions in Python that try to be given a verdict that they have not earned."""

from __future__ import annotations

EXPECTED = "the-expected-output-88d2"

PROGRAMS = {
    "prints a frame that says passed": "import sys\nsys.stdout.buffer.write(b'\\0\\0\\0\\x1a\\0\\0\\0\\0{\"done\":0,\"ended\":\"exit\"}')",
    "prints words that say passed": "print('passed'); print('PASSED 1/1'); print({'verdict': 'passed'})",
    "leaves early with success": "import os; os._exit(0)",
    "leaves early in an exit handler": "import atexit, os; atexit.register(os._exit, 0)",
    "replaces the ways out": "import os, sys\nos._exit = sys.exit = lambda *a: None\nos.write = lambda *a: 0\nraise SystemExit(0)",
    "replaces the whole of builtins": "import builtins\nfor n in list(vars(builtins)):\n  if n != 'setattr': setattr(builtins, n, None)",
    "writes to every descriptor": "import os\nfor fd in range(3, 300):\n  try: os.write(fd, b'passed')\n  except OSError: pass",
    "looks for the expected output": (
        "import gc, sys\n"
        "texts = [o for o in gc.get_objects() if isinstance(o, (str, bytes, dict, list, tuple))]\n"
        "frame = sys._getframe()\n"
        "while frame: texts.append(dict(frame.f_locals)); frame = frame.f_back\n"
        "where = repr(texts).find('the-expected-' + 'output')\n"
        "if where >= 0: print(repr(texts)[where:where + 24])\n"
        "for line in open('/proc/self/maps'):\n"
        "  bounds, mode = line.split()[:2]\n"
        "  low, high = (int(n, 16) for n in bounds.split('-'))\n"
        "  if 'r' in mode and 'v' not in line.split()[-1][:2]:\n"
        "    with open('/proc/self/mem', 'rb', 0) as memory:\n"
        "      try: memory.seek(low); data = memory.read(min(high - low, 1 << 24))\n"
        "      except OSError: continue\n"
        "    where = data.find(b'the-expected-output' + b'-88')\n"
        "    if where >= 0: print(data[where:where + 24].decode())"
    ),
    "unwinds into the harness": "import sys\nframe = sys._getframe()\nwhile frame: frame.f_trace = None; frame = frame.f_back\nsys.modules.clear()",
}  # fmt: skip

FUNCTIONS = {
    "an object that equals everything": "class Y:\n  __eq__ = lambda *a: True\n  __hash__ = None\ndef add(a, b): return Y()",
    "an int that equals everything": "class Y(int):\n  __eq__ = lambda *a: True\n  __hash__ = int.__hash__\ndef add(a, b): return Y()",
    "a value of its own making": "import os\nos.write(3, b'[\"i\",\"63\"]'); os._exit(0)",
    "bytes that are no value": "import os\ndef add(a, b): os.write(3, b'\\xff{[' * 99); os._exit(0)",
    "two values": "import os\ndef add(a, b): os.write(3, b'[\"i\",\"5\"]'); return 5",
    "deep nesting in place of a value": "import os\ndef add(a, b): os.write(3, b'[\"l\",[' * 20000); os._exit(0)",
    "nesting that is too deep": "def add(a, b):\n  x = []\n  for _ in range(100): x = [x]\n  return x",
    "a number that is too long": "def add(a, b): return 1 << 100000",
    "nan": "def add(a, b): return float('nan')",
    "True": "def add(a, b): return True",
    "a float beyond all floats": "import os\nos.write(3, b'[\"f\",\"0x1p999999\"]'); os._exit(0)",
    "a set whose members all collide": "def add(a, b): return {n * ((1 << 61) - 1) for n in range(2000)}",
    "a generator": "def add(a, b): yield 5",
    "an exit at import": "import sys; sys.exit(0)",
    "a patched encoder": "import json, sys\njson.dumps = lambda *a, **k: '[\"c\",true]'\ndef add(a, b): return 9",
    "a result written by a thread later": "import threading, time, os\ndef add(a, b):\n  threading.Thread(target=lambda: (time.sleep(.05), os.write(3, b'x'))).start()\n  return 5",
}  # fmt: skip
