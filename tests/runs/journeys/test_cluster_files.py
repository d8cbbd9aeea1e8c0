"""The files for Slurm and Kubernetes: what they have Mettle and Ray do is what these take today."""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from ray_hosts import RAY, ray_folder
from stories import CONFIG, check_accounts, environment
from tests.namespaces import network

from mettle.cli.main import cli
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir

FILES = Path(__file__).parents[3] / "configs" / "cluster"
NOTES = """\
import json, os, sys
with open(os.environ["NOTES"], "a") as notes:
    notes.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
"""
SRUN = """\
#!/bin/bash
while [ "$1" != -w ]; do shift; done
path=NODE_$2
shift 2
exec $WAY${!path} "$@"
"""
"""Slurm's own, as far as the script needs it: the command, on the node that is named."""
SCONTROL = '#!/bin/sh\necho "$3" | tr , "\\n"\n'
NEEDS_RAY = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray: pip install -e '.[ray]'")


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs `mettle`, `ray`, `python` that write down how they are called, before all others."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in ("mettle", "ray", "python"):
        program(folder, name, f"#!{sys.executable} -IS\n{NOTES}")
    program(folder, "srun", SRUN)
    program(folder, "scontrol", SCONTROL)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "one,two,three")
    for name in ("WAY", "NODE_one", "NODE_two", "NODE_three"):
        monkeypatch.setenv(name, "")
    return tmp_path / "notes"


def submit(*arguments: object) -> None:
    """Run the script of Slurm and what it leaves in the background to their ends."""
    command = ["bash", str(FILES / "slurm.sh"), *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300.0
    )  # to the end of all who have the pipes
    assert done.returncode == 0, (done.stdout, done.stderr)


def calls(notes: Path, name: str) -> list[list[str]]:
    """What the programs of a name were given."""
    told = [json.loads(line) for line in notes.read_text().splitlines()]
    return [arguments for called, *arguments in told if called == name]


def parsed(command: click.Command, arguments: list[str], name: str = "mettle") -> tuple[click.Command, dict[str, Any]]:
    """What a command line makes of its arguments. Raises: click.UsageError where it takes them no more."""
    context = command.make_context(name, list(arguments))
    if not isinstance(command, click.Group):
        return command, context.params
    called, found, left = command.resolve_command(context, [*context._protected_args, *context.args])
    assert found is not None
    return parsed(found, left, called or "")


@pytest.mark.parametrize("is_begun", [False, True])
def test_the_slurm_script_starts_ray_on_every_node_and_then_runs_or_resumes(
    tmp_path: Path, noted: Path, is_begun: bool
) -> None:
    run_dir = RunDir(tmp_path / "run")
    if is_begun:
        run_dir.path.mkdir()
        run_dir.ledger.touch()
    submit("run.toml", run_dir.path)
    (call,) = calls(noted, "mettle")
    command, params = parsed(cli, call)
    assert command.name == ("resume" if is_begun else "run")
    if is_begun:
        assert params["run"] == str(run_dir.path)
    else:
        assert (params["arguments"], params["directory"]) == (("run.toml",), run_dir.path)
    heads = [call for call in calls(noted, "ray") if "--head" in call]
    assert (len(heads), len(calls(noted, "ray"))) == (1, 3)


@NEEDS_RAY
def test_ray_takes_what_the_slurm_script_gives_it(tmp_path: Path, noted: Path) -> None:
    from ray.scripts.scripts import cli as ray

    submit("run.toml", tmp_path / "run")
    for call in calls(noted, "ray"):
        assert parsed(ray, call, "ray")[0].name == "start"


def test_the_kubernetes_job_runs_mettle_as_its_command_line_is(tmp_path: Path, noted: Path) -> None:
    volume, job = yaml.safe_load_all((FILES / "kuberay.yaml").read_text())
    assert (volume["kind"], job["kind"], job["apiVersion"]) == ("PersistentVolumeClaim", "RayJob", "ray.io/v1")
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (claim,) = [one["persistentVolumeClaim"]["claimName"] for one in pod["volumes"]]
        (mounted,) = [mount for container in pod["containers"] for mount in container["volumeMounts"]]
        assert (claim, mounted["mountPath"]) == (volume["metadata"]["name"], "/shared"), "the run is where all see it"
    entry = job["spec"]["entrypoint"].replace("/shared", str(tmp_path))
    subprocess.run(shlex.split(entry), check=True, timeout=300.0)
    RunDir(tmp_path / "runs" / "one").path.mkdir(parents=True)
    RunDir(tmp_path / "runs" / "one").ledger.touch()
    subprocess.run(shlex.split(entry), check=True, timeout=300.0)
    first, second = (parsed(cli, call) for call in calls(noted, "mettle"))
    assert (first[0].name, second[0].name) == ("run", "resume")
    assert first[1]["arguments"] == (str(tmp_path / "run.toml"),)
    assert str(first[1]["directory"]) == second[1]["run"] == str(tmp_path / "runs" / "one")


@pytest.mark.nightly
@pytest.mark.timeout(900)
@NEEDS_RAY
def test_the_slurm_script_runs_a_run_on_two_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    program(programs, "srun", SRUN)
    program(programs, "scontrol", SCONTROL)
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.replace("hub = false", 'hub = false\nengine = "ray"\nnum_trainer_ranks = 2'))
    with network(head=0.0, far=0.005) as hosts, ray_folder() as folder:
        told = {
            **environment(), "PATH": f"{programs}:{RAY.parent}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "head,far",
            "WAY": "nsenter --net=", "NODE_head": hosts["head"].namespace, "NODE_far": hosts["far"].namespace,
            "GLOO_SOCKET_IFNAME": "eth0", "RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0",
        }  # fmt: skip
        output = tmp_path / "output.txt"
        with hosts["head"].inside(), output.open("wb") as out:
            command = ["bash", str(FILES / "slurm.sh"), str(config), str(tmp_path / "run")]
            job = subprocess.Popen(command, env=told, stdout=out, stderr=subprocess.STDOUT)
        assert job.wait(800.0) == 0, output.read_text(errors="replace")
    ledger = Ledger(RunDir(tmp_path / "run").ledger, is_read_only=True)
    check_accounts(ledger)
    (place,) = [event.message for event in ledger.journal.events(kind="place") if "trainer runs on" in event.message]
    assert len(set(place.removeprefix("trainer runs on ").split(", "))) == 2, "a rank on each host"
    ledger.close()
