"""What pip installs works without the checkout: wheel and sdist are built, and the wheel is used from an empty folder.

The everyday test takes Mettle from the wheel and its dependencies from this interpreter; the nightly one installs
everything into a virtual environment of its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "--max-steps", "2", "--trainer.scheduler.warmup-steps", "0", "--trainer.scheduler.decay-steps", "2",
    "--warm-up.sft.target-reward", "0.01", "--orchestrator.batch-size", "32", "--orchestrator.eval.num-examples", "4",
)  # fmt: skip

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """Folder with a wheel and an sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return folder


class Installed:
    """A virtual environment with the wheel, and an empty folder to use it from."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "venv" / "bin"
        self.work = folder / "work"
        self.work.mkdir()
        venv.create(folder / "venv", symlinks=True)  # this interpreter has a pip, and unpacking another takes long
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "METTLE"))}
        self._environ = {**kept, "HOME": str(folder), "PATH": f"{self.bin}:{os.environ['PATH']}"}

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=self.work, env=self._environ, capture_output=True, text=True, timeout=500)

    def pip(self, *words: str) -> None:
        pip = (sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "--disable-pip-version-check")
        done = self.run(*pip, "install", "--quiet", *words)
        assert done.returncode == 0, done.stderr

    def mettle(self, *words: str) -> str:
        done = self.run(str(self.bin / "mettle"), *words)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout


@pytest.fixture(scope="module")
def installed(dist, tmp_path_factory):
    made = Installed(tmp_path_factory.mktemp("elsewhere"))
    [wheel] = dist.glob("*.whl")
    made.pip("--no-deps", "--no-index", str(wheel))
    # A folder that a .pth names is searched, but its own .pth files, which lead to the checkout, are not read.
    site = made.run(
        str(made.bin / "python"), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"
    ).stdout.strip()
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return made


def test_wheel_and_sdist_hold_what_is_used_and_nothing_else(dist):
    [wheel], [sdist] = dist.glob("*.whl"), dist.glob("*.tar.gz")
    sizes = {entry.filename: entry.file_size for entry in zipfile.ZipFile(wheel).infolist()}
    names = set(sizes)
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"mettle", "mettle_names.pth"}
    assert {
        "mettle/py.typed",
        "mettle/runs/quickstart.toml",
        "mettle/environments/reverse_text/reverse_text.py",
    } <= names
    assert [name for name in names if re.search(r"dist-info/licenses/(LICENSE|.*OFL|.*uPlot)", name)]
    assert not [name for name in names if "/tests/" in name or name.endswith((".pyc", ".db"))]
    assert not {name: size for name, size in sizes.items() if size > 200_000}, "no user needs it"
    assert sum(sizes.values()) < 10e6
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "src/mettle/py.typed"} <= packed


def test_the_wheel_works_from_an_empty_folder(installed):
    where = installed.run(str(installed.bin / "python"), "-c", "import mettle; print(mettle.__file__)").stdout
    assert str(installed.bin.parent) in where
    assert json.loads(installed.mettle("doctor", "--json"))
    listed = installed.mettle("env", "list", "--json")
    assert {"reverse-text", "arithmetic", "wordle"} <= {env["name"] for env in json.loads(listed)}
    assert "reverse" in installed.mettle("env", "info", "reverse-text")
    recipe = next(installed.bin.parent.rglob("mettle/runs/quickstart.toml"))
    resolved = json.loads(installed.mettle("rl", "run", str(recipe), "--json", "--dry-run", *SMALL))
    assert resolved["config"]["max_steps"] == 2


@pytest.mark.nightly
def test_a_run_of_the_wheel_trains(installed):
    recipe = next(installed.bin.parent.rglob("mettle/runs/quickstart.toml"))
    summary = json.loads(installed.mettle("rl", "run", str(recipe), "--json", *SMALL))
    assert summary["state"] == "finished"
    assert summary["steps"] == 2


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_everything_is_found_by_pip_and_the_tutorial_runs(dist, tmp_path):
    made = Installed(tmp_path)
    [wheel] = dist.glob("*.whl")
    torch = os.environ.get("METTLE_TEST_TORCH", "torch==2.13.0+cpu")
    made.pip(torch, f"{wheel}[train,hub]")
    assert json.loads(made.mettle("quickstart", "--steps", "24", "--json", "--no-browser"))["state"] == "finished"
    made.mettle("doctor")
    made.mettle("lab", "setup", "lab")
    page = (ROOT / "docs" / "tutorials" / "from-data-to-training.md").read_text()
    lines = re.findall(r"^    (\S.*)$", page, re.MULTILINE)
    asked = "\n".join(
        line + " --max-steps 2 --warm_up.sft.target_reward 0.11" if line.startswith("mettle rl run") else line
        for line in lines
        if not line.startswith("mettle eval check")
    )
    done = made.run("bash", "-ec", asked)
    assert done.returncode == 0, (done.stdout, done.stderr)
