"""Layers: measured by what code inside finds, required by name, refused where the host has them not; and the doctor."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, get_args

import ordinary
import pytest
from owners import ENVIRONMENT

from mettle.cli import main
from mettle.errors import UserError
from mettle.sandbox import IsolationReport, Layer, MachinePool, SandboxConfig, SandboxPool
from mettle.sandbox.config import RequiredLayer, read_requirement
from mettle.sandbox.doctor import HostReport, examine_host
from mettle.sandbox.host_ids import HostIds
from mettle.sandbox.isolation import check, examine, refused, with_cgroups

LAYERS = {*get_args(RequiredLayer)} - {"network", "own-kernel", "own-users"}  # those are of containers
USERS = HostIds((100_000, 4096))
NESTING = """
import os
from mettle.sandbox.zygote import jail, kernel
"".encode("ascii"); open(os.devnull, encoding="ascii").close()
if os.geteuid() == 0: os.setgroups([]); os.setresgid(64113, 64113, 64113); os.setresuid(64113, 64113, 64113); kernel.set_dumpable(True)
uid = os.geteuid()
kernel.unshare(kernel.CLONE_NEWUSER); jail.map_user(1000, uid)
for name, text in jail._KERNEL_LIMITS.items(): kernel.set_control(name, text)
for flags in (kernel.CLONE_NEWUSER, kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS):
    try: kernel.unshare(flags); print("made")
    except OSError as error: print(error.errno)
"""


@pytest.fixture(scope="module")
def host(_needs_isolation: None) -> HostReport:
    return examine_host()


def found(**changes: Any) -> dict[str, Any]:
    """What code inside a whole jail finds, with changes."""
    whole: dict[str, Any] = {
        "namespaces": dict.fromkeys(("user", "mnt", "pid", "net", "ipc", "uts", "cgroup"), "another:[1]"),
        **{"effects": {}, "root": ["usr"], "writable": [], "is_machine": False, "processes": [1, 2], "host_files": []},
        **{"host_user": 100_007, "makes_whiteouts": False, "privileges": [], "unlimited": [], "calls": []},
    }
    return {**whole, **changes}


@pytest.mark.parametrize(
    ("changes", "layer", "grade"),
    [
        ({}, "", "ns"),
        ({"writable": ["/usr"]}, "read-only-root", "none"),
        ({"processes": [1, 2, 3, 4]}, "private-proc", "none"),
        ({"host_files": ["kallsyms"]}, "private-proc", "none"),
        ({"processes": []}, "own-proc", "ns"),
        ({"privileges": ["regain a capability"]}, "no-privileges", "none"),
        ({"unlimited": ["NPROC"]}, "resource-limits", "none"),
        ({"calls": ["bpf"]}, "seccomp", "ns-noseccomp"),
        ({"makes_whiteouts": True}, "landlock", "ns"),
        ({"host_user": 64113}, "own-host-user", "ns"),
    ],
)
def test_a_layer_is_what_code_inside_found_and_not_what_was_set_up(
    changes: dict[str, Any], layer: str, grade: str
) -> None:
    report = examine(SandboxConfig(), found(**changes), {"namespaces": "", "seccomp": "", "landlock": ""}, USERS)
    missing = {one.id for one in report.layers if not one.is_in_force and not one.id.startswith(("cgroup-", "cpu-"))}
    assert missing == ({layer} if layer else set())
    assert report.grade == grade


def test_a_namespace_that_is_the_hosts_is_no_layer() -> None:
    import os

    spaces = {**found()["namespaces"], "cgroup": os.readlink("/proc/self/ns/cgroup")}
    report = examine(SandboxConfig(), found(namespaces=spaces), {"seccomp": "", "landlock": ""})
    assert not report.layer("cgroup-namespace").is_in_force
    assert report.grade == "none"


def test_every_layer_that_may_be_required_is_one_that_is_measured(host: HostReport) -> None:
    for report in (host.judge, host.machines):
        assert {layer.id for layer in report.layers} == LAYERS


@pytest.mark.usefixtures("_needs_isolation")
@pytest.mark.parametrize("make", [SandboxPool, MachinePool])
async def test_a_pool_starts_where_the_host_has_the_layers_that_it_names(make: Any) -> None:
    async with make(SandboxConfig(require=("ns", "seccomp", "private-proc"))) as pool:
        assert pool.isolation.layer("seccomp").is_in_force


@pytest.mark.usefixtures("_needs_isolation")
async def test_a_pool_is_refused_where_the_host_has_not_and_the_layer_is_named() -> None:
    with pytest.raises(UserError, match=r"cgroup memory: .*\(only machines get cgroups\)"):
        await SandboxPool(SandboxConfig(require=("ns", "cgroup-memory"))).__aenter__()


def test_a_requirement_that_is_not_met_names_each_layer_and_what_would_help() -> None:
    layers = (Layer("seccomp", True, "fine"), Layer("landlock", False, "no Landlock", "Linux 5.19"))
    report = with_cgroups(IsolationReport("zygote", "ns", layers, "", "", ""), ("memory",), "not mounted", "mount it")
    check(report, SandboxConfig(require=("seccomp", "cgroup-memory")))
    with pytest.raises(UserError) as caught:
        check(report, SandboxConfig(require=("ns", "landlock", "cgroup-pids")))
    for words in ("'ns' and 'landlock' and 'cgroup-pids'", "no Landlock", "not mounted", "Linux 5.19; mount it"):
        assert words in str(caught.value)
    check(report, SandboxConfig(backend="unsafe", require=("landlock",)))
    assert report.meets("ns")
    assert report.meets(("ns", "cgroup-memory"))
    assert not report.meets(("ns", "landlock"))


def test_a_layer_that_nobody_knows_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match="did you mean 'landlock'"):
        read_requirement(["lanlock"])
    with pytest.raises(ValueError, match="require"):
        SandboxConfig(require=("lanlock",))  # type: ignore[arg-type]


def test_a_user_namespace_inside_can_make_no_other_even_without_the_filter() -> None:
    run = subprocess.run([sys.executable, "-c", NESTING], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        pytest.skip(f"this host makes no user namespaces: {run.stderr[-200:]}")
    assert run.stdout.split() == ["28", "28"], "ENOSPC, from the kernel's own counter"


def test_the_doctor_shows_each_layer_for_both_kinds_of_sandbox(host: HostReport) -> None:
    text = "\n".join(host.lines())
    for layer in host.judge.layers:
        assert layer.name in text
    assert "tests ns, machines ns" in text
    assert "denied" not in text, "a host that gives everything is not told what it lacks"


@pytest.mark.usefixtures("_needs_isolation")
def test_the_doctor_fails_where_what_is_required_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["sandbox", "doctor", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["grade"] == "ns"
    assert {layer["id"] for layer in data["machines"]["layers"]} == LAYERS
    assert main.run(["sandbox", "doctor", "--require", "ns", "--require", "cgroup-memory"]) == 1
    assert "not met: tests: " in capsys.readouterr().out
    assert main.run(["sandbox", "doctor", "--require", "lanlock"]) == 2
    assert "did you mean 'landlock'" in capsys.readouterr().err


@pytest.fixture(scope="module")
def other_interpreter(_needs_isolation: None) -> str:
    found_one = ordinary.interpreter()
    if found_one is None:
        pytest.skip("started by an ordinary user already, or no interpreter that one can run finds these packages")
    return found_one


def test_an_ordinary_user_has_the_layers_that_root_has(host: HostReport, other_interpreter: str) -> None:
    code = "import json; from mettle.sandbox.doctor import examine_host; print(json.dumps(examine_host().as_dict()))"
    run = ordinary.run(other_interpreter, ["-c", code], timeout_s=60)
    assert run.returncode == 0, run.stderr
    theirs = json.loads(run.stdout)
    assert theirs["user"] == f"user {ordinary.UID}"
    ours = host.as_dict()
    for layer, other in zip(ours["layers"], theirs["layers"], strict=True):
        if layer["id"] == "own-host-user" and not other["in_force"]:  # this user has no range in /etc/subuid
            assert "user" in other["detail"], other
            assert "usermod --add-subuids" in other["fix"]
            continue
        assert (layer["id"], layer["in_force"]) == (other["id"], other["in_force"])
    assert theirs["machines"]["grade"] == ours["machines"]["grade"]


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["contained", pytest.param("", id="all", marks=pytest.mark.nightly)])
def test_the_attacks_are_contained_when_an_ordinary_user_starts_the_pool(other_interpreter: str, chosen: str) -> None:
    """Every attack of `test_attacks.py` by another user; in the nightly tier those without isolation too."""
    directory = ordinary.ROOT / "tests" / "sandbox"
    options = ["-q", "-p", "no:cacheprovider", "-x", "-k", chosen, f"--rootdir={ordinary.ROOT}"]
    arguments = ["-m", "pytest", *options, str(directory / "journeys" / "test_attacks.py")]
    run = ordinary.run(other_interpreter, arguments, timeout_s=380)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]


def test_a_report_names_each_layer_and_what_would_help() -> None:
    report = refused(SandboxConfig(), {"user": "unshare(0x10000000): No space left on device [ENOSPC]", "seccomp": ""})
    text = "\n".join(report.lines())
    assert "NO   user namespace" in text
    assert "user.max_user_namespaces" in text
    assert report.as_dict()["grade"] == "none"
    with pytest.raises(Exception, match=r"user\.max_user_namespaces"):
        check(report, SandboxConfig())


def test_a_weaker_grade_is_taken_only_when_it_is_required() -> None:
    report = IsolationReport(
        "zygote", "ns-noseccomp", (Layer("seccomp", False, "old kernel", "new kernel"),), "", "", ""
    )
    with pytest.raises(Exception, match="old kernel"):
        check(report, SandboxConfig())
    check(report, SandboxConfig(require="ns-noseccomp"))
