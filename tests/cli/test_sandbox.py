"""`mettle sandbox` from one command to the next: a service starts by itself, and what is typed reaches a machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from own_service import services, typed

from mettle.sandbox.service import local
from mettle.sandbox.service.tokens import read_tokens

pytestmark = pytest.mark.usefixtures("forked_commands")


@pytest.mark.usefixtures("own")
def test_create_exec_and_delete_are_three_commands_and_nothing_is_started_by_hand(own: Path) -> None:
    made = typed("create", "--label", "for=me")
    assert made.returncode == 0, made.stderr
    machine = made.stdout.decode().split()[0]
    assert made.stdout == f"{machine}\n".encode(), "nothing else, so that a script can take it"
    assert f"next: mettle sandbox exec {machine}".encode() in made.stderr
    ran = typed("exec", machine, "--", "sh", "-c", r"printf 'a\377\0'; echo b >&2; exit 7")
    assert (ran.returncode, ran.stdout, ran.stderr) == (7, b"a\xff\0", b"b\n"), "bytes as they are, and the exit code"
    assert typed("exec", "-i", machine, "wc -c | tr -d ' '", stdin=b"x" * 100_000).stdout == b"100000\n"
    assert len(services(own)) == 1
    assert typed("delete", machine).returncode == 0
    gone = typed("exec", machine, "--", "true")
    assert gone.returncode != 0
    assert gone.stderr == f"error: machine {machine} has ended: it was deleted\n".encode()


def test_two_first_commands_at_once_start_one_service(own: Path) -> None:
    words = [sys.executable, "-m", "mettle.cli", "sandbox", "run", "--", "echo", "ran"]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE) for _ in range(2)]
    assert [process.communicate(timeout=300)[0] for process in both] == [b"ran\n", b"ran\n"]
    assert len(services(own)) == 1


def test_an_idle_service_ends_by_itself(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "IDLE_EXIT_S", 0.3)
    assert local.local_service({"sandbox": {"warm": 0}}).startswith("unix:")  # it has answered
    deadline = time.monotonic() + 100
    while services(own) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not services(own)
    assert not local.local_socket().exists()


def test_a_runtime_directory_that_others_can_enter_is_refused(own: Path, mettle: Callable[..., object]) -> None:
    (own / "mettle").mkdir(mode=0o755)
    ended = mettle("sandbox", "list")
    assert ended.code == 2
    assert "others cannot enter" in ended.err


@pytest.mark.usefixtures("own")
def test_files_jobs_and_lists(mettle: Callable[..., object], tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("into the machine")
    machine = mettle("sandbox", "create", "--json", "--label", "kind=a", "--name", "one", "--memory", 128).json["id"]
    assert mettle("sandbox", "upload", machine, "in.txt", "/app/it").code == 0
    assert mettle("sandbox", "download", machine, "/app/it", "out.txt").code == 0
    assert (tmp_path / "out.txt").read_text() == "into the machine"
    missing = mettle("sandbox", "download", machine, "nothing")
    assert (missing.code, "No such file" in missing.err) == (2, True)
    job = mettle("sandbox", "exec", "--background", machine, "--", "sh", "-c", "echo working; exit 3").out.split()[0]
    deadline = time.monotonic() + 100
    while (logs := mettle("sandbox", "logs", machine, "--json").json)["exit_code"] is None:
        assert time.monotonic() < deadline
    assert (logs["job"], logs["stdout"], logs["exit_code"]) == (job, "working\n", 3)
    assert "exit code 3" in mettle("sandbox", "logs", machine, job).err
    listed = mettle("sandbox", "list", "--json", "--label", "kind=a", "--status", "running").json["machines"]
    assert [(one["id"], one["name"], one["memory_mb"]) for one in listed] == [(machine, "one", 128)]
    assert "kind=a" in mettle("sandbox", "list").out
    assert mettle("sandbox", "delete", "--label", "kind=a", "--json").json == {"deleted": [machine], "missing": []}
    again = mettle("sandbox", "delete", machine)
    assert (again.code, machine in again.err) == (2, True)


@pytest.mark.usefixtures("own")
def test_a_command_that_takes_too_long_ends_as_timeout_does(mettle: Callable[..., object]) -> None:
    ended = mettle("sandbox", "run", "--timeout", "0.3", "--", "sleep", "9")
    assert (ended.code, "--timeout" in ended.err) == (124, True)
    assert mettle("sandbox", "list", "--status", "running", "--json").json["machines"] == []
    shown = mettle("sandbox", "run", "--json", "--", "echo", "hi").json
    assert (shown["stdout"], shown["exit_code"], shown["is_timed_out"]) == ("hi\n", 0, False)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["exec", "m-0", "--timeout", "-1", "--", "true"], "--timeout is -1"),
        (["run", "--upload", "nowhere", "--", "true"], "nowhere cannot be uploaded"),
        (["run", "--memory", "1", "--", "true"], "memory_mb is 1"),
        (["create", "--env", "=x"], "cannot be set"),
        (["delete"], "which machines?"),
        (["list", "--url", "gopher://x"], "not the address"),
        (["token", "a b"], "a token's name"),
        (["token", "t", "--quota", "max_x=1"], "no quota 'max_x'"),
        (["token", "t", "--quota", "max_machines=few"], "needs a number"),
        (["token", "t", "--revoke"], "no token 't'"),
        (["serve", "--backend", "zigote"], "no sandbox backend 'zigote'"),
        (["serve", "--config", "no.toml"], "no.toml"),
    ],
)
def test_mistakes_are_one_line(
    mettle: Callable[..., object], words: list[str], error: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("METTLE_SANDBOX_URL", "http://127.0.0.1:1")
    ended = mettle("sandbox", *words)
    assert ended.code == 2, ended
    assert error in ended.err
    assert len(ended.err.splitlines()) == 1


def test_a_token_is_shown_once_and_kept_as_a_hash(
    mettle: Callable[..., object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    made = mettle("sandbox", "token", "trainer", "--quota", "max_machines=5")
    token = made.out.strip()
    path = tmp_path / "mettle" / "sandbox-tokens.json"
    assert token.startswith("msb_")
    assert token not in path.read_text()
    assert read_tokens(path)[0]["quota"] == {"max_machines": 5}
    assert "trainer" in mettle("sandbox", "token").out
    assert mettle("sandbox", "token", "trainer").code == 2
    assert mettle("sandbox", "token", "trainer", "--revoke").code == 0
    assert read_tokens(path) == []


def test_a_service_without_tokens_says_how_to_make_one(
    mettle: Callable[..., object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("METTLE_SANDBOX_TOKEN", raising=False)
    ended = mettle("sandbox", "serve", "--port", "0")
    assert (ended.code, "mettle sandbox token NAME" in ended.err) == (2, True)


@pytest.mark.usefixtures("own")
def test_serve_and_its_clients_meet_by_url_and_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METTLE_SANDBOX_TOKEN", "a token that is long enough")
    config = tmp_path / "service.toml"
    config.write_text("[quota]\nmax_machines = 1\n[sandbox]\nwarm = 1\n")
    words = [sys.executable, "-m", "mettle.cli", "sandbox", "serve", "--port", "0", "--config", str(config)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as process:
        assert process.stdout is not None
        try:
            url = next(word for word in process.stdout.readline().decode().split() if word.startswith("http"))
            assert typed("run", "--url", url, "--", "echo", "hi").stdout == b"hi\n"
            assert typed("create", "--url", url).returncode == 0
            full = typed("create", "--url", url)
            assert b"max_machines 1" in full.stderr
            doctor = typed("doctor", "--url", url)
            assert doctor.returncode == 0
            assert b"grade ns" in doctor.stdout
            bench = typed("bench", "--url", url, "-n", "3", "--json")
            assert bench.returncode != 0, "the quota leaves room for no other machine"
            monkeypatch.setenv("METTLE_SANDBOX_TOKEN", "another one, and as long")
            assert b"does not know the token" in typed("list", "--url", url).stderr
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(100)
    assert process.returncode == 0


@pytest.mark.usefixtures("_isolated")
def test_bench_compares_with_a_plain_process(mettle: Callable[..., object]) -> None:
    figures = mettle("sandbox", "bench", "-n", "3", "--json").json["figures"]
    assert len(figures) == 5
    assert figures[0]["ratio"] == 1.0
    assert all(figure["p50_ms"] > 0 for figure in figures)


@pytest.mark.usefixtures("own")
def test_what_a_person_types_without_dashes_reaches_the_machine(mettle: Callable[..., object]) -> None:
    machine = mettle("sandbox", "create", "--memory", "128M", "--json").json["id"]
    assert typed("exec", machine, "printf", "%s|", "-i", "--timeout", "9").stdout == b"-i|--timeout|9|"
    assert typed("exec", machine, "--cwd", "/tmp", "pwd").stdout == b"/tmp\n"
    assert typed("run", "--memory", "64M", "sh", "-c", "echo -n").returncode == 0
    assert mettle("sandbox", "list", "--json").json["machines"][0]["memory_mb"] == 128


@pytest.mark.usefixtures("own")
def test_lists_show_what_runs_and_on_demand_what_has_ended(mettle: Callable[..., object]) -> None:
    assert mettle("sandbox", "list").out == "no machine is running\nnext: mettle sandbox create\n"
    machine = mettle("sandbox", "create").out.strip()
    assert mettle("sandbox", "delete", machine).code == 0
    assert machine not in mettle("sandbox", "list").out
    assert f"{machine}" in mettle("sandbox", "list", "-a").out
    assert "it was deleted" in mettle("sandbox", "list", "--status", "ended").out


@pytest.mark.usefixtures("own")
def test_logs_are_followed_to_the_end_of_the_job(mettle: Callable[..., object], tmp_path: Path) -> None:
    machine = mettle("sandbox", "create").out.strip()
    wait = "echo first; while [ ! -e go ]; do sleep 0.05; done; echo last; exit 5"
    assert mettle("sandbox", "exec", "--background", machine, "--", "sh", "-c", wait).out == "1\n"
    words = [sys.executable, "-m", "mettle.cli", "sandbox", "logs", "-f", machine]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as following:
        assert following.stdout is not None
        assert following.stdout.readline() == b"first\n", "while it runs"
        (tmp_path / "go").write_text("")
        assert mettle("sandbox", "upload", machine, str(tmp_path / "go")).code == 0
        out, err = following.communicate(timeout=300)
    assert (out, err) == (b"last\n", b"job 1 has ended: exit code 5\n")


@pytest.mark.usefixtures("own")
def test_a_directory_comes_out_without_its_links(mettle: Callable[..., object], tmp_path: Path) -> None:
    machine = mettle("sandbox", "create").out.strip()
    make = "mkdir -p out/deep && echo a > out/a && echo b > out/deep/b && ln -s /etc/passwd out/link && chmod 755 out/a"
    assert mettle("sandbox", "exec", machine, "--", make).code == 0
    done = mettle("sandbox", "download", machine, "out", "here")
    assert "2 files, 4 bytes; 1 links left out" in done.out
    found = sorted(str(path.relative_to(tmp_path / "here")) for path in (tmp_path / "here").rglob("*"))
    assert found == ["a", "deep", "deep/b"]
    assert (tmp_path / "here" / "a").stat().st_mode & 0o111
    (tmp_path / "trap").mkdir()
    (tmp_path / "trap" / "deep").symlink_to(tmp_path)
    assert mettle("sandbox", "download", machine, "out", "trap").code == 0
    assert not (tmp_path / "b").exists(), "a link that is here already is not followed"
    refused = mettle("sandbox", "download", machine, "out", "-")
    assert (refused.code, "directory" in refused.err) == (2, True)


@pytest.mark.usefixtures("own")
def test_a_command_without_memory_says_which_option_gives_more() -> None:
    ended = typed("run", "--memory", "64", "--", "python3", "-c", "x = bytearray(300 << 20)")
    assert ended.returncode != 0
    assert b"64 MB of memory were not enough" in ended.stderr, ended


@pytest.mark.parametrize(
    ("word", "meant"), [("rm", "delete"), ("ls", "list"), ("ps", "list"), ("cp", "upload"), ("lits", "list")]
)
def test_words_of_other_tools_are_answered_with_ours(mettle: Callable[..., object], word: str, meant: str) -> None:
    ended = mettle("sandbox", word)
    assert (ended.code, f"did you mean 'mettle sandbox {meant}'" in ended.err) == (2, True)
