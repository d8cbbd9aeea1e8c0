"""`mettle doctor`: findings with advice, and an exit code a script can use."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mettle.runs import leftovers, preflight, repairs
from mettle.runs.preflight import Finding


def test_every_check_has_a_finding_and_what_is_not_ok_has_advice(monkeypatch):
    monkeypatch.setattr(
        preflight, "CHECKS", {n: c for n, c in preflight.CHECKS.items() if n not in ("torch", "sandbox")}
    )
    found = list(preflight.findings())
    assert [finding.name for finding in found] == list(preflight.CHECKS)
    assert [finding.name for finding in found if finding.level != "ok" and not finding.advice] == []
    assert [finding.name for finding in found if not finding.detail] == []


@pytest.mark.parametrize(("level", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_the_exit_code_is_1_only_when_something_is_missing(mettle, monkeypatch, level, code):
    monkeypatch.setattr(preflight, "CHECKS", {"disk": lambda: Finding("disk", level, "0 GiB free", "make room")})
    ended = mettle("doctor")
    assert ended.code == code
    assert f"{level:<4}  disk                 0 GiB free\n" in ended.out
    assert "-> make room" in ended.out
    assert ("not ready: disk" in ended.out) == (level == "fail")
    found = mettle("doctor", "--json").json
    assert found == {
        "ok": level != "fail",
        "checks": [{"name": "disk", "level": level, "detail": "0 GiB free", "advice": "make room", "commands": []}],
    }


def test_a_check_that_fails_itself_is_a_finding(mettle, monkeypatch):
    monkeypatch.setattr(preflight, "CHECKS", {"odd": lambda: 1 / 0})
    ended = mettle("doctor")
    assert ended.code == 1
    assert "the check itself failed: ZeroDivisionError" in ended.out


def test_a_full_disk_and_a_folder_that_cannot_be_written_fail(monkeypatch, tmp_path):
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: type("U", (), {"free": 5})())
    assert preflight.CHECKS["disk"]().level == "fail"

    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(preflight.tempfile, "TemporaryFile", refuse)
    finding = preflight.CHECKS["write access"]()
    assert (finding.level, "Permission denied" in finding.detail) == ("fail", True)


def test_the_hubs_port_in_use_is_a_warning(monkeypatch):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr(preflight, "HUB_PORT", taken.getsockname()[1])
        finding = preflight.CHECKS["ports"]()
    assert finding.level == "warn"
    assert "--port" in finding.advice


def test_torch_that_does_not_import_is_a_failure_with_its_reason(monkeypatch):
    monkeypatch.setattr(preflight, "_TORCH", "import no_such_torch")
    finding = preflight.CHECKS["torch"]()
    assert finding.level == "fail"
    assert "No module named 'no_such_torch'" in finding.detail


@pytest.fixture
def vllm_found(monkeypatch, tmp_path):
    """The check's finding where the interpreter that has vLLM is this script."""

    def look(script):
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        monkeypatch.setenv(preflight.VLLM_PYTHON, str(python))
        return preflight.CHECKS["vllm"]()

    return look


def test_a_vllm_that_works_is_named_with_its_version_and_device(vllm_found):
    answer = 'echo "a library greets"; echo \'{"version": "0.32.0", "device": "cpu"}\''
    finding = vllm_found(answer)
    assert (finding.level, finding.detail.startswith("0.32.0 on cpu, in ")) == ("ok", True)
    old = vllm_found(answer.replace("0.32", "0.9"))
    assert (old.level, old.advice) == ("warn", "Mettle takes vLLM from 0.32 on")


def test_a_vllm_that_cannot_be_imported_says_why(vllm_found, monkeypatch, tmp_path):
    finding = vllm_found("echo 'ImportError: libcudart.so.12 is missing' >&2; exit 1")
    assert finding.level == "warn"
    assert "libcudart.so.12 is missing" in finding.detail
    assert "serve-with-vllm.md" in finding.advice
    monkeypatch.setenv(preflight.VLLM_PYTHON, str(tmp_path / "elsewhere"))
    assert "there is no such file" in preflight.CHECKS["vllm"]().detail
    monkeypatch.delenv(preflight.VLLM_PYTHON)
    assert preflight.CHECKS["vllm"]().level == "ok"  # nobody has to have it


def test_packages_that_are_missing_are_named_by_extra(monkeypatch):
    wanted = ["click>=8", "no-such-package>=1", "torch>=2; extra == 'train'", 'no-such-either ; extra == "hub"']
    monkeypatch.setattr(preflight.importlib.metadata, "requires", lambda _: wanted)
    assert preflight.missing_by_extra() == {"": ["no-such-package"], "train": [], "hub": ["no-such-either"]}
    assert preflight.CHECKS["packages"]().level == "fail"


def test_the_sandbox_report_is_shown_and_graded(mettle):
    ended = mettle("sandbox", "doctor", "--json")
    report = ended.json
    assert ended.code == (0 if report["grade"] == "ns" else 1)
    assert {"id", "name", "in_force", "detail", "fix"} == set(report["layers"][0])
    assert preflight.CHECKS["sandbox"]().level == ("ok" if report["grade"] == "ns" else "warn")


def _only(monkeypatch, *names):
    monkeypatch.setattr(preflight, "CHECKS", {name: preflight.CHECKS[name] for name in names})
    monkeypatch.setattr(repairs, "CHECKS", preflight.CHECKS)


def _run_left_by_a_dead_supervisor(folder):
    """A run whose supervisor died: its lock names a process that is gone, and so does the address of its engine."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (folder / "endpoints").mkdir(parents=True)
    (folder / "run.db").write_bytes(b"")
    (folder / "supervisor.lock").write_text(json.dumps({"pid": gone.pid}))
    (folder / "endpoints" / "inference.json").write_text(json.dumps({"port": 1, "pid": gone.pid}))
    return folder


def test_what_a_dead_run_left_is_cleared_and_found_clear_again(mettle, monkeypatch, tmp_path):
    _only(monkeypatch, "dead runs")
    run = _run_left_by_a_dead_supervisor(tmp_path / "runs" / "mine")
    assert "mine: 2 files of processes that are gone" in mettle("doctor").out
    assert (run / "endpoints" / "inference.json").exists(), "a look changes nothing"
    ended = mettle("doctor", "--fix", "--json")
    assert ended.json["repairs"] == [
        {
            "name": "dead runs",
            "status": "fixed",
            "what": "clear what mine left behind",
            "detail": "none in ./runs left anything behind",
        }
    ]
    assert ended.json["checks"][0]["level"] == "ok"
    assert not (run / "endpoints" / "inference.json").exists()
    assert (run / "supervisor.lock").read_text() == ""
    assert (run / "run.db").exists()


def test_nothing_of_a_run_that_lives_is_touched(mettle, monkeypatch, tmp_path):
    import fcntl

    _only(monkeypatch, "dead runs")
    run = _run_left_by_a_dead_supervisor(tmp_path / "runs" / "mine")
    with (run / "supervisor.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert mettle("doctor", "--fix", "--json").json["repairs"] == []
        left = leftovers.DeadRun(leftovers.RunDir(run), (run / "endpoints" / "inference.json",))
        with pytest.raises(BlockingIOError):
            left.clear()
    assert (run / "endpoints" / "inference.json").exists()


def test_outputs_are_added_to_gitignore_and_what_was_in_it_stays(mettle, monkeypatch, tmp_path):
    _only(monkeypatch, "git")
    assert mettle("doctor", "--json").json["checks"][0]["level"] == "ok", "no workspace, nothing to say"
    (tmp_path / "environments").mkdir()
    assert mettle("doctor", "--json").json["checks"][0]["level"] == "ok", "no repository, nothing to say"
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text("mine\n/outputs/")
    assert "git would add /runs/, /data/" in mettle("doctor").out
    ended = mettle("doctor", "--fix")
    assert "fixed: add /runs/, /data/ to .gitignore" in ended.out
    assert (tmp_path / ".gitignore").read_text() == "mine\n/outputs/\n/runs/\n/data/\n"


def test_a_repair_that_does_not_help_is_not_called_fixed(mettle, monkeypatch, tmp_path):
    _only(monkeypatch, "git")
    (tmp_path / "environments").mkdir()
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(leftovers, "paths_not_ignored", lambda: ["/runs/"])
    ended = mettle("doctor", "--fix", "--json").json
    assert ended["repairs"][0]["status"] == "not fixed"
    assert ended["checks"][0]["level"] == "warn"


def test_a_repair_that_raises_is_a_finding_still(mettle, monkeypatch, tmp_path):
    def refuse():
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(preflight, "CHECKS", {"git": lambda: Finding("git", "warn", "d", "a")})
    monkeypatch.setattr(repairs, "CHECKS", preflight.CHECKS)
    monkeypatch.setattr(repairs, "REPAIRS", {"git": lambda: repairs.Repair("do it", refuse)})
    ended = mettle("doctor", "--fix")
    assert "not fixed: do it (PermissionError: [Errno 13] Permission denied)" in ended.out


def test_packages_are_named_by_their_exact_command_and_installed_only_when_that_is_said(mettle, monkeypatch):
    _only(monkeypatch, "packages")
    wanted = ["click>=8", "no-such-package<2,>=1; extra == 'math'"]
    monkeypatch.setattr(preflight.importlib.metadata, "requires", lambda _: wanted)
    command = f"{sys.executable} -m pip install 'no-such-package<2,>=1'"
    ran = []
    monkeypatch.setattr(repairs.subprocess, "run", lambda words, **_: ran.append(words))
    ended = mettle("doctor", "--fix")
    assert f"$ {command}\n" in ended.out
    assert "not run: `mettle doctor --fix --yes` runs it" in ended.out
    assert ran == []
    ended = mettle("doctor", "--fix", "--yes", "--json").json
    assert ran == [[sys.executable, "-m", "pip", "install", "no-such-package<2,>=1"]]
    assert ended["repairs"][0]["status"] == "not fixed", "pip said nothing wrong, and it is still not there"


def test_an_environment_that_lacks_packages_is_installed_with_them(mettle, monkeypatch, tmp_path):
    _only(monkeypatch, "environment packages")
    folder = tmp_path / "environments" / "chess"
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "chess"\ndependencies = ["mettle-lab", "verifiers>=0.1", "no-such-package>=1"]\n'
    )
    ended = mettle("doctor", "--fix")
    assert "packages are missing for chess" in ended.out
    assert f"$ {sys.executable} -m pip install -e environments/chess" in ended.out


def test_the_state_folder_is_made_writable(mettle, monkeypatch, tmp_path):
    _only(monkeypatch, "state folder")
    folder = tmp_path / "state" / "mettle"
    folder.mkdir(parents=True)
    real = preflight.os.access
    monkeypatch.setattr(
        preflight.os,
        "access",
        lambda path, mode: real(path, mode) and bool(preflight.Path(path).stat().st_mode & 0o200),
    )  # root may write anywhere; here the owner's own bit counts
    folder.chmod(0o500)
    ended = mettle("doctor", "--fix", "--json").json
    assert ended["repairs"][0]["status"] == "fixed"
    assert folder.stat().st_mode & 0o700 == 0o700


def test_what_needs_root_is_shown_as_commands(tmp_path):
    (tmp_path / "kernel").mkdir()
    (tmp_path / "user").mkdir()
    (tmp_path / "kernel" / "unprivileged_userns_clone").write_text("0\n")
    (tmp_path / "user" / "max_user_namespaces").write_text("31000\n")
    assert preflight.sandbox_commands(tmp_path) == ("sudo sysctl -w kernel.unprivileged_userns_clone=1",)
    (tmp_path / "user" / "max_user_namespaces").write_text("0\n")
    assert "sudo sysctl -w user.max_user_namespaces=15000" in preflight.sandbox_commands(tmp_path)


def test_yes_without_fix_is_a_slip(mettle):
    ended = mettle("doctor", "--yes")
    assert (ended.code, ended.err) == (2, "error: --yes is an answer to --fix: `mettle doctor --fix --yes`\n")
