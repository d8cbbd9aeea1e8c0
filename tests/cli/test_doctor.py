"""`mettle doctor`: findings with advice, and an exit code a script can use."""

from __future__ import annotations

import pytest

from mettle.cli import preflight
from mettle.cli.preflight import Finding


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
    assert f"{level:<4}  disk          0 GiB free\n" in ended.out
    assert "-> make room" in ended.out
    assert ("not ready: disk" in ended.out) == (level == "fail")
    found = mettle("doctor", "--json").json
    assert found == {
        "ok": level != "fail",
        "checks": [{"name": "disk", "level": level, "detail": "0 GiB free", "advice": "make room"}],
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


def test_packages_that_are_missing_are_named_by_extra(monkeypatch):
    wanted = ["click>=8", "no-such-package>=1", "torch>=2; extra == 'train'", 'no-such-either ; extra == "hub"']
    monkeypatch.setattr(preflight.importlib.metadata, "requires", lambda _: wanted)
    assert preflight.missing_by_extra() == {"": ["no-such-package"], "train": [], "hub": ["no-such-either"]}
    assert preflight.CHECKS["packages"]().level == "fail"


def test_the_sandbox_report_is_shown_and_graded(mettle):
    ended = mettle("sandbox", "doctor", "--json")
    report = ended.json
    assert ended.code == (0 if report["grade"] == "ns" else 1)
    assert {"name", "in_force", "detail", "fix"} == set(report["layers"][0])
    assert preflight.CHECKS["sandbox"]().level == ("ok" if report["grade"] == "ns" else "warn")
