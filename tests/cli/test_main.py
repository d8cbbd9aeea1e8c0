"""The entry point: lazy, kind to slips, and every ending has one line and an exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from mettle.cli import main
from mettle.cli.groups import Lazy
from mettle.cli.terminal import going_on
from mettle.errors import ProviderError, ServiceError, StorageError, UserError
from mettle.processes import fork_server

HEAVY = ("pydantic", "numpy", "torch", "transformers", "fastapi", "aiohttp", "httpx", "rich", "asyncio", "sqlite3")


@pytest.fixture
def failing(monkeypatch):
    """Make `mettle fail` raise what the test wants."""

    def install(error: BaseException) -> None:
        @click.command()
        def fail() -> None:
            with going_on("`mettle fail` goes on"):
                raise error

        monkeypatch.setitem(main.NOUNS, "fail", Lazy("mettle.cli.test_only:fail", "Fails."))
        monkeypatch.setitem(sys.modules, "mettle.cli.test_only", type("M", (), {"fail": fail}))

    return install


def test_help_lists_every_noun(capsys):
    assert main.run(["--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for name, entry in main.NOUNS.items():
        assert f" {name} {entry.help}" in out


@pytest.mark.parametrize("name", list(main.NOUNS))
def test_every_noun_has_help_and_the_line_shown_for_it_is_its_own(name, capsys):
    assert main.run([name, "--help"]) == 0
    assert main.NOUNS[name].help in " ".join(capsys.readouterr().out.split())


def test_help_is_quick_and_imports_nothing_heavy():
    code = (
        "import sys, time\n"
        "from mettle.cli.main import run\n"
        f"assert run(['--help']) == 0 and run(['rl', '--help']) == 0\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "assert not loaded, loaded\n"
        "sys.stderr.write(str(time.process_time()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stderr) < 0.3, "seconds of CPU time for two help pages"


def test_version(capsys):
    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out == "mettle, version 0.1.0\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["quikstart"], "error: no command 'quikstart'; did you mean 'mettle quickstart'?; see `mettle --help`\n"),
        (["trainer"], "error: no command 'trainer'; that is `mettle rl start RUN trainer` here; see `mettle --help`\n"),
        (["rl", "resme"], "error: no command 'resme'; did you mean 'mettle rl resume'?; see `mettle rl --help`\n"),
        (
            ["eval", "zzz"],
            "error: no command 'zzz'; there are check, compare, export, import, list, logs, push, pushed, run, samples, stop,"
            " view; see `mettle eval --help`\n",
        ),
        (["rl", "stop"], "error: Missing argument 'RUN'; see `mettle rl stop --help`\n"),
    ],
)
def test_a_slip_is_one_line_and_exit_2(arguments, line, capsys):
    assert main.run(arguments) == 2
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("command", sorted(set(main.ELSEWHERE.values())))
def test_what_is_named_for_words_of_others_is_there(command, capsys):
    words = [word for word in command.split()[1:] if word.islower()]
    if words[:2] == ["rl", "start"]:
        words = words[:2]
    assert main.run([*words, "--help"]) == 0
    assert "Usage: mettle" in capsys.readouterr().out


def test_an_unknown_option_is_one_line_and_exit_2(capsys):
    assert main.run(["quickstart", "--sed", "1"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "--seed" in err


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("no such thing\nat all"), 2, "error: no such thing at all\n"),
        (StorageError("disk full"), 2, "error: disk full\n"),
        (ServiceError("server gone"), 3, "error: server gone\n"),
        (ProviderError("endpoint gone"), 3, "error: endpoint gone\n"),
        (KeyboardInterrupt(), 130, "stopped; `mettle fail` goes on\n"),
        (click.Abort(), 130, "stopped; `mettle fail` goes on\n"),
    ],
)
def test_an_error_is_one_line_and_its_exit_code(failing, capsys, error, code, line):
    failing(error)
    assert main.run(["fail"]) == code
    assert capsys.readouterr().err.strip("\n") == line.strip("\n")


def test_a_crash_is_one_line_that_names_the_traceback(failing, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("METTLE_DEBUG", raising=False)
    failing(RuntimeError("first line\nsecond line"))
    assert main.run(["fail"]) == 1
    err = capsys.readouterr().err
    (crash,) = (tmp_path / "mettle").glob("crash-*.txt")
    assert err.startswith("error: RuntimeError: first line (")
    assert err.count("\n") == 1
    assert str(crash) in err
    assert "Traceback (most recent call last)" in crash.read_text()


def test_a_crash_shows_its_traceback_when_debugging(failing, capsys, monkeypatch):
    monkeypatch.setenv("METTLE_DEBUG", "1")
    failing(RuntimeError("broken"))
    assert main.run(["fail"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_the_installed_command_ends_with_these_codes(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mettle.cli", "rl", "metrics", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: no run at ")
    assert done.stderr.count("\n") == 1


def test_ctrl_c_in_a_running_command_says_how_to_go_on(tmp_path):
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (tmp_path / "run" / "run.db").touch()
    (logs / "trainer.log").write_text('{"time": 1, "level": "info", "logger": "mettle.trainer", "message": "hello"}\n')
    process = subprocess.Popen(
        [sys.executable, "-m", "mettle.cli", "rl", "logs", str(tmp_path / "run"), "-f"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    assert "hello" in process.stdout.readline()
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 130
    assert err.strip() == "stopped; the run itself goes on"


def run_module(folder, code):
    """With `-m`, where Python looks for itself whether a Ctrl-C has ended it."""
    (folder / "interrupted.py").write_text(code)
    command = [sys.executable, "-m", "interrupted"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("imported", ["click", "mettle.cli.doctor"])
def test_ctrl_c_while_something_is_imported_is_one_line(imported, tmp_path):
    code = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == '{imported}': exec('raise KeyboardInterrupt')\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from mettle.cli.__main__ import main\n"
        "sys.argv = ['mettle', 'doctor']\n"
        "main()\n"
    )
    done = run_module(tmp_path, code)
    assert (done.returncode, done.stderr.strip()) == (130, "stopped")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_ended_before_there_is_one_says_so_and_leaves_no_process(number, tmp_path):
    code = (
        "import atexit, os\n"
        "from mettle.processes.child import descendants\n"
        "from mettle.runs import head_start, launch\n"
        "def interrupted(*_):\n"
        "    print(len(descendants(os.getpid())))\n"
        f"    os.kill(os.getpid(), {int(number)})\n"
        "atexit.register(lambda: print(len(descendants(os.getpid()))))\n"
        "head_start.IMPORTS = ('json',)\n"
        "launch.load_run_config = interrupted\n"
        "from mettle.cli.main import main\n"
        "main(['rl', 'run', 'x.toml'])\n"
    )
    done = run_module(tmp_path, code)
    assert done.returncode == 130, done.stderr
    assert done.stderr.strip() == "stopped; `mettle rl list` shows the run, and `mettle rl resume RUN` continues it"
    assert done.stdout.split() == [str(int(fork_server.IS_POSSIBLE)), "0"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("words", "busy", "how"),
    [
        (["branch", "."], "branch.branch", "`mettle rl list` shows the branch if it was made already, and"),
        (["branch", "."], "launch.drive", "`mettle rl resume runs/x-v1` continues the run"),
        (["share", "x.toml", "--base-model", "m", "--dir", "s"], "launch.load_run_config", "`mettle rl resume s` cont"),
        (["resume", "s"], "sharing.drive_share", "`mettle rl resume s` continues the share"),
    ],
)
def test_branches_and_shares_end_with_a_line_before_their_supervisor_listens(words, busy, how, number, tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "run.db").touch()
    if words[0] == "resume":
        (tmp_path / "s" / "share.json").write_text("{}")
    code = (
        "import os\n"
        "from pathlib import Path\n"
        "from mettle.storage.run_dir import RunDir\n"
        "from mettle.runs import branch, launch, sharing\n"
        "branch.branch = lambda *_: RunDir(Path('runs/x-v1'))\n"
        f"{busy} = lambda *_, **__: os.kill(os.getpid(), {int(number)})\n"
        "from mettle.cli.main import main\n"
        f"main(['rl', *{words}])\n"
    )
    done = run_module(tmp_path, code)
    assert done.returncode == 130, done.stderr
    assert done.stderr.strip().startswith(f"stopped; {how}"), done.stderr
    assert "\n" not in done.stderr.strip()


def test_a_reader_that_has_seen_enough_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m mettle.cli --help | true; exit ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stderr == ""


def test_the_help_page_is_this(capsys):
    main.run(["--help"])
    expected = Path(__file__).with_name("help.txt").read_text()
    assert capsys.readouterr().out.split() == expected.split(), "write the new page to tests/cli/help.txt"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_can_complete(shell):
    done = subprocess.run(
        [sys.executable, "-c", "from mettle.cli.main import main; main()"],
        env={**os.environ, "_METTLE_COMPLETE": f"{shell}_source"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "_METTLE_COMPLETE" in done.stdout


def test_quickstart_hands_its_options_on(monkeypatch, tmp_path):
    from mettle.runs import quickstart

    given = []
    monkeypatch.setattr("mettle.runs.head_start.IMPORTS", ("json",))
    monkeypatch.setattr(quickstart, "quickstart", lambda options, begun: given.append(options) or {"state": "stopped"})
    words = ["quickstart", "--seed", "3", "--steps", "5", "--dir", str(tmp_path), "--no-browser", "--hard", "--json"]
    assert main.run(words) == 130, "a person stopped it"
    assert given == [
        quickstart.QuickstartOptions(
            seed=3, steps=5, dir=tmp_path, is_browser=False, is_json=True, is_hard=True, port=None
        )
    ]
