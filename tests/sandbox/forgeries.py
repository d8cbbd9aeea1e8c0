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


def _perl_text(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


PERL: Final = {
    "says that it has passed": f"print {_perl_text(FRAME)}, qq(\\nPASSED\\n);",
    "leaves early": "BEGIN { require POSIX; POSIX::_exit(0) } die;",
    "reads what is expected": "my ($path) = split ' ', <STDIN>; open F, '<', $path or die; local $/; print <F> =~ tr/\\0/\\n/r;",
    "rewrites itself": (
        "$| = 1; print qq(honest\\n); chmod 0777, $0; unlink $0;\n"
        "open F, '>', $0 or exit; print F 'print qq(forged\\n)'; close F;"
    ),
    "leaves a file": (
        "my ($p, $left) = split ' ', <STDIN>; print -e $left ? qq(seen\\n) : qq(clean\\n); open F, '>', $left; print F 'x';"
    ),
    "plants a module": f"system({_perl_text(PLANT)});",
    "leaves a process": f"system({_perl_text(DAEMON)});",
    "floods": "while (1) { syswrite STDOUT, 'y' x 4096; syswrite STDERR, 'y' x 4096 }",
}
_REPACK: Final = (
    "mkdir -p $HOME/forged && cd $HOME/forged && "
    "printf 'public class Main { public static void main(String[] a) { System.out.println(\"forged\"); } }' > Main.java "
    "&& javac -d classes Main.java && jar -c -f new.jar -C classes . && cp -f new.jar JAR; rm -rf $HOME/forged"
)
_RUST_SHELL: Final = 'fn main() {{ let _ = std::process::Command::new("sh").args(["-c", {}]).status(); }}'
_JAVA: Final = (
    "import java.io.*;\nimport java.nio.file.*;\nimport java.util.*;\npublic class Main {{\n"
    "static String[] words() throws Exception {{\n"
    'return new BufferedReader(new InputStreamReader(System.in)).readLine().split(" "); }}\n'
    'static void shell(String s) throws Exception {{ new ProcessBuilder("sh", "-c", s).start().waitFor(); }}\n'
    "public static void main(String[] a) throws Exception {{ {} }} }}"
)
JAVA: Final = {
    "says that it has passed": _JAVA.format(f'System.out.println({_c_text(FRAME)}); System.out.println("PASSED");'),
    "leaves early": (
        "public class Main { static { Runtime.getRuntime().halt(0); }\n"
        "public static void main(String[] a) { throw new Error(); } }"
    ),
    "reads what is expected": _JAVA.format(
        "byte[] b = new FileInputStream(words()[0]).readAllBytes();\n"
        "System.out.println(new String(b).replace((char) 0, (char) 10));"
    ),
    # A jar is an archive: a shell packs one of another program in its place.
    "rewrites itself": _JAVA.format(
        'System.out.println("honest"); String jar = System.getProperty("java.class.path");\n'
        "shell(" + _c_text(_REPACK) + '.replace("JAR", jar));'
    ),
    "leaves a file": _JAVA.format(
        'File f = new File(words()[1].trim()); System.out.println(f.exists() ? "seen" : "clean"); f.createNewFile();'
    ),
    "plants a module": _JAVA.format(f"shell({_c_text(PLANT)});"),
    "leaves a process": _JAVA.format(f"shell({_c_text(DAEMON)});"),
    "floods": _JAVA.format('while (true) { System.out.print("yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy"); }'),
}
RUST: Final = {
    "says that it has passed": f'fn main() {{ println!("{{}}", {_c_text(FRAME)}); println!("PASSED"); }}',
    "leaves early": "fn main() { std::process::exit(0); #[allow(unreachable_code)] { panic!() } }",
    "reads what is expected": (
        "fn main() { let mut s = String::new(); std::io::stdin().read_line(&mut s).unwrap();\n"
        "let b = std::fs::read(s.split(' ').next().unwrap()).unwrap();\n"
        'println!("{}", String::from_utf8_lossy(&b).replace(0 as char, "\\n")); }'
    ),
    "rewrites itself": (
        "use std::os::unix::fs::PermissionsExt;\n"
        'fn main() { println!("honest"); let p = std::env::args().next().unwrap(); let _ = std::fs::remove_file(&p);\n'
        'if std::fs::write(&p, "#!/bin/sh\\necho forged\\n").is_ok() {\n'
        "let _ = std::fs::set_permissions(&p, std::fs::Permissions::from_mode(0o777)); } }"
    ),
    "leaves a file": (
        "fn main() { let mut s = String::new(); std::io::stdin().read_line(&mut s).unwrap();\n"
        "let p = s.split(' ').nth(1).unwrap(); let seen = std::path::Path::new(p).exists();\n"
        'println!("{}", if seen { "seen" } else { "clean" }); let _ = std::fs::write(p, "x"); }'
    ),
    "plants a module": _RUST_SHELL.format(_c_text(PLANT)),
    "leaves a process": _RUST_SHELL.format(_c_text(DAEMON)),
    "floods": 'fn main() { loop { println!("yyyyyyyyyyyyyyyyyyyyyyyy"); eprintln!("yyyyyyyyyyyyyyyyyyyy"); } }',
}
TCL: Final = {
    "says that it has passed": f"puts {{{FRAME}}}; puts PASSED",
    "leaves early": "exit 0; error no",
    "reads what is expected": (
        "set f [open [lindex [split [gets stdin]] 0] rb]; puts [string map [list \\0 \\n] [read $f]]"
    ),
    "rewrites itself": (
        "puts honest; flush stdout; set me [info script]; catch {file attributes $me -permissions 0777}\n"
        "catch {file delete $me}; catch {set f [open $me w]; puts $f {puts forged}; close $f}"
    ),
    "leaves a file": (
        "set left [lindex [split [gets stdin]] 1]; puts [expr {[file exists $left] ? {seen} : {clean}}]\n"
        "close [open $left w]"
    ),
    "plants a module": f"exec sh -c {{{PLANT}}}",
    "leaves a process": f"exec sh -c {{{DAEMON}}}",
    "floods": "while 1 { puts yyyyyyyyyyyyyyyyyyyyyyyyyyyy; puts stderr yyyyyyyyyyyyyyyyyy }",
}
FORGERIES: Final = {
    "bash": BASH, "javascript": JAVASCRIPT, "c": C, "cpp": C, "perl": PERL, "java": JAVA, "rust": RUST, "tcl": TCL,
}  # fmt: skip
