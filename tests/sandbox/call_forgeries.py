"""Functions that try to be taken for right, in JavaScript and bash, and a judge that believes them.

`add(2, 3)` is asked for, and 5 is expected. `NAIVE` compares in the process that has loaded the code, as harnesses do
that run a benchmark's assertions; the forgeries in `DECEIVES` get a pass from it.
"""

from __future__ import annotations

from typing import Final

NAIVE: Final = """
const fs = require('fs'), vm = require('vm'), assert = require('assert');
globalThis.require = require; globalThis.process = process;
function check(solve, expected) {
  const got = solve(2, 3);
  if (got == expected) return;
  if (JSON.stringify(got) !== JSON.stringify(expected)) assert.deepEqual(got, expected);
}
vm.runInThisContext(fs.readFileSync(process.argv[2], 'utf8'));
check(vm.runInThisContext('add'), 5);
"""
DECEIVES: Final = {
    "leaves with success when it is loaded": "process.exit(0)",
    "leaves with success when it is called": "function add() { process.exit(0) }",
    "leaves with success below the runtime": "function add() { process.reallyExit(0) }",
    "ends its own process well in an exit handler": (
        "process.on('exit', () => process.reallyExit(0)); function add() { throw new Error('no') }"
    ),
    "catches every exception": "process.on('uncaughtException', () => {}); function add() { throw new Error('no') }",
    "replaces the assertion": (
        "const a = require('assert'); for (const n of Object.keys(a)) a[n] = () => {}; function add() { return 9 }"
    ),
    "replaces JSON.stringify": "JSON.stringify = () => '5'; function add() { return 9 }",
    "an object with a valueOf": "function add(a, b) { return { valueOf: () => a + b } }",
    "an object with a toString": "function add(a, b) { return { toString: () => String(a + b) } }",
    "an object with a toJSON": "function add(a, b) { return { toJSON: () => a + b } }",
    "a number in an object": "function add(a, b) { return new Number(a + b) }",
    "a number as text": "function add(a, b) { return String(a + b) }",
    "an array that reads as a number": "function add(a, b) { return [a + b] }",
    "asks its caller what is expected": "function add() { return add.caller.arguments[1] }",
}
GAINS_NOTHING: Final = {
    "a Proxy that answers everything": (
        "function add() { return new Proxy({}, { get: () => 5, ownKeys: () => [], getPrototypeOf: () => null }) }"
    ),
    "a Proxy in an array": "function add() { return [new Proxy([5], {})] }",
    "a getter": "function add() { return { get value() { return 5 } } }",
    "an instance of a class": "class Five { value = 5 }\nfunction add() { return new Five() }",
    "a symbol": "function add() { return Symbol('5') }",
    "a function": "function add() { return () => 5 }",
    "a generator": "function* add() { yield 5 }",
    "nothing": "function add() {}",
    "nan": "function add() { return NaN }",
    "a promise that never comes": "function add() { return new Promise(() => {}) }",
    "a then that never answers": "function add() { return { then() {} } }",
    "a promise that fails": "async function add() { throw new Error('no') }",
    "a ring": "function add() { const ring = []; ring.push(ring); return ring }",
    "a value of its own making": "require('fs').writeSync(3, '6'); process.exit(0)",
    "a value, and then another": "function add() { require('fs').writeSync(3, '5,'); return 5 }",
    "bytes that are no value": "require('fs').writeSync(3, Buffer.from([255, 123, 91])); process.exit(0)",
    "nesting in place of a value": "require('fs').writeSync(3, '['.repeat(20000)); process.exit(0)",
    "a tag that does not exist": "require('fs').writeSync(3, '{\"$record\":\"Verdict\"}'); process.exit(0)",
    "a number without end": "require('fs').writeSync(3, '9'.repeat(50000)); process.exit(0)",
    "infinity in JSON": "require('fs').writeSync(3, '1e999'); process.exit(0)",
    "a key that cannot be one": "require('fs').writeSync(3, '{\"$map\":[[[1],5]]}'); process.exit(0)",
    "a frame of process 1": (
        'const f = require(\'fs\'), t = \'{"done":0,"ended":"exit","status":0,"lengths":[0,0,1]}5\';\n'
        "const head = Buffer.alloc(8); head.writeUInt32BE(t.length - 1); head.writeUInt32BE(1, 4);\n"
        "for (let fd = 1; fd < 4; fd++) try { f.writeSync(fd, Buffer.concat([head, Buffer.from(t)])) } catch (e) {}\n"
        "process.exit(0)"
    ),
    "a five to every descriptor but its own": (
        "for (let fd = 4; fd < 300; fd++) try { require('fs').writeSync(fd, '5') } catch (e) {}\n"
        "console.log(5); process.exit(0)"
    ),
    "replaces what a process leaves by": (
        "process.reallyExit = process.exit = () => {}; require('fs').writeSync = () => 1; process._exiting = true;\n"
        "function add() { return 9 }"
    ),
    "gives every object a toJSON": "Object.prototype.toJSON = () => 5; function add() { return { value: 9 } }",
    "replaces every built-in method": (
        "for (const kind of [Array, Object, String, Number, Map, Set, Promise, Buffer, Function]) {\n"
        "  for (const n of Object.getOwnPropertyNames(kind.prototype)) try { kind.prototype[n] = () => 5 } catch (e) {}\n"
        "}\nfunction add() { return 9 }"
    ),
    "gives every object a value": (
        "Object.prototype.value = 5; Object.prototype.$int = '5'; Object.prototype.get = () => 5;\n"
        "function add() { return [,] }"
    ),
    "floods the value": "function add() { for (;;) require('fs').writeSync(3, '5'.repeat(1 << 16)) }",
}
LOOKS_THROUGH_ITS_MEMORY: Final = (
    "const fs = require('fs');\nfunction add() {\n"
    "  const fd = fs.openSync('/proc/self/mem'), word = ['forty-two', 'and', 'seven'].join('-');\n"
    "  for (const line of fs.readFileSync('/proc/self/maps', 'utf8').split('\\n')) {\n"
    "    const [low, high, mode] = line.split(/[- ]/);\n"
    "    if (!mode || !mode.startsWith('rw') || /stack|vvar/.test(line)) continue;\n"
    "    const room = Buffer.alloc(Math.min(parseInt(high, 16) - parseInt(low, 16), 1 << 22));\n"
    "    try { fs.readSync(fd, room, 0, room.length, BigInt('0x' + low)) } catch (e) { continue }\n"
    "    for (let at = -1; (at = room.indexOf(word, at + 1)) >= 0;) {\n"
    "      const end = at + word.length; if (room[end] === 33) return room.toString('latin1', at, end + 1);\n"
    "    }\n"
    "  }\n}"
)
BASH: Final = {
    "leaves with success when it is loaded": "exit 0",
    "leaves with success when it is called": "add() { exit 0; }",
    "prints when it is loaded": "echo 5\nadd() { :; }",
    "a value of its own making": "printf '6.' >&3; exit 0",
    "replaces what the driver uses": "printf() { :; }; exit() { :; }; declare() { :; }; add() { echo 6; }",
    "two values": "add() { echo 5; echo 5; }",
    "a five to every descriptor but its own": "for fd in 1 2 4 5 6 7 8 9; do echo 5 >&$fd; done 2>/dev/null; exit 0",
    "a trap at its end": "trap 'echo 5; exit 0' EXIT; add() { exit 3; }",
}  # fmt: skip
