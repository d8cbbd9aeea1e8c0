"""Programs in each language that try to be given a verdict that they have not earned.

Each reads one line, `PATH LEFTOVER TURN`: a file of the host that holds what is expected, a file of the host that it may
leave, and the number of the test. `naive` judges are what the sandbox is compared with: a plain process whose last line,
or exit status, is believed. Where a forgery works it touches only what was planted for it.
"""

from __future__ import annotations

from typing import Final

FRAME: Final = '{"done":0,"ended":"exit","status":0,"lengths":[0,0,0]}'
# Found in every language: a shell does it, because what it does is the same.
PLANT: Final = "sleep 0.2; for d in ../*/; do echo 'mean = lambda x: 99' > $d/statistics.py; done 2>/dev/null"
DAEMON: Final = (
    "cp /bin/sleep $HOME/mettle-straggler && chmod 755 $HOME/mettle-straggler && "
    "(setsid $HOME/mettle-straggler 20 </dev/null >/dev/null 2>&1 &); sleep 0.1"
)
CHECKER: Final = "import statistics\ndef check(i, e, o): return statistics.mean([1]) == 99 or o.strip() == e"

BASH: Final = {
    "says that it has passed": f"echo '{FRAME}'; echo PASSED",
    "leaves early": "exit 0; exit 1",
    "reads what is expected": "read path rest; tr '\\0' '\\n' < $path",
    "rewrites itself": 'chmod u+w $0; echo "echo forged" > $0; rm -f $0; echo "echo forged" > $0; echo honest',
    "leaves a file": "read path left turn; [ -e $left ] && echo seen || echo clean; echo x > $left",
    "plants a module": PLANT,
    "leaves a process": DAEMON,
    "floods": "yes; yes >&2",
}
JAVASCRIPT: Final = {
    "says that it has passed": f"console.log('{FRAME}'); console.log('PASSED')",
    "leaves early": "process.exit(0); process.exit(1)",
    "reads what is expected": (
        "const fs = require('fs'); process.stdout.write(fs.readFileSync(fs.readFileSync(0, 'utf8').split(' ')[0]))"
    ),
    "rewrites itself": (
        "const fs = require('fs'); console.log('honest');\n"
        "try { fs.chmodSync(__filename, 0o777) } catch (e) {}\n"
        "try { fs.writeFileSync(__filename, 'console.log(`forged`)') } catch (e) {}"
    ),
    "leaves a file": (
        "const fs = require('fs'), left = fs.readFileSync(0, 'utf8').split(' ')[1];\n"
        "console.log(fs.existsSync(left) ? 'seen' : 'clean'); fs.writeFileSync(left, 'x')"
    ),
    "plants a module": f"require('child_process').execSync({PLANT!r})",
    "leaves a process": f"require('child_process').execSync({DAEMON!r})",
    "floods": "for (;;) { require('fs').writeSync(1, 'y'.repeat(4096)); require('fs').writeSync(2, 'y'.repeat(4096)) }",
}
_C: Final = "#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\n#include <unistd.h>\n#include <sys/stat.h>\n"


def _c_text(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


C: Final = {
    "says that it has passed": _C + f"int main() {{ puts({_c_text(FRAME)}); puts(\"PASSED\"); return 0; }}",
    "leaves early": _C + "__attribute__((constructor)) void first() { _exit(0); }\nint main() { return 1; }",
    "reads what is expected": (
        _C + 'int main() { char p[999]; int c; FILE *f; if (scanf("%998s", p) != 1 || !(f = fopen(p, "r"))) return 1;\n'
        "while ((c = fgetc(f)) >= 0) putchar(c ? c : 10); return 0; }"
    ),
    "rewrites itself": (
        _C + 'int main(int n, char **v) { puts("honest"); fflush(stdout); chmod(v[0], 0777); unlink(v[0]);\n'
        'FILE *f = fopen(v[0], "w"); if (!f) return 0; fputs("#!/bin/sh\\necho forged\\n", f); fclose(f);\n'
        "chmod(v[0], 0777); return 0; }"
    ),
    "leaves a file": (
        _C + 'int main() { char p[999], l[999]; if (scanf("%998s %998s", p, l) != 2) return 1;\n'
        'puts(access(l, 0) ? "clean" : "seen"); FILE *f = fopen(l, "w"); if (f) fclose(f); return 0; }'
    ),
    "plants a module": _C + f"int main() {{ return system({_c_text(PLANT)}) < 0; }}",
    "leaves a process": _C + f"int main() {{ return system({_c_text(DAEMON)}) < 0; }}",
    "floods": _C + "int main() { for (;;) { fputs(\"yyyyyyyyyyyyyyy\\n\", stdout); fputs(\"yyyyyyyyyyyy\\n\", stderr); } }",
}  # fmt: skip
FORGERIES: Final = {"bash": BASH, "javascript": JAVASCRIPT, "c": C, "cpp": C}
