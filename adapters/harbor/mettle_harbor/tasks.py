"""A task folder as data: `task.toml`, `instruction.md`, `environment/`, `tests/`.

Parts: `HarborTask`, `find_tasks`, `read_task`. Invariant: what is wrong with a folder is said when it is read, with the
path and the value; nothing is started here.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mettle.errors import UserError
from mettle_harbor.dockerfile import TaskWorld, read_dockerfile

VERIFIER_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class HarborTask:
    """One task."""

    name: str
    folder: Path
    instruction: str
    config: dict[str, Any]
    world: TaskWorld = field(default_factory=TaskWorld)

    @property
    def tests(self) -> Path:
        """The folder with `test.sh`."""
        return self.folder / "tests"

    @property
    def solution(self) -> Path:
        """The folder with the reference solution, which need not exist."""
        return self.folder / "solution"

    @property
    def docker_image(self) -> str | None:
        """The image that a hosted sandbox would use."""
        image = self.section("environment").get("docker_image")
        return str(image) if image else None

    @property
    def agent_timeout_s(self) -> float | None:
        """Seconds for the agent; None when the task sets no limit."""
        return _seconds(self, "agent")

    @property
    def verifier_timeout_s(self) -> float:
        """Seconds for the tests."""
        return _seconds(self, "verifier") or VERIFIER_TIMEOUT_S

    @property
    def verifier_env(self) -> dict[str, str]:
        """Environment variables of the tests."""
        return {str(name): str(value) for name, value in (self.section("verifier").get("env") or {}).items()}

    def section(self, name: str) -> Mapping[str, Any]:
        """A table of `task.toml`, empty when it is not there."""
        found = self.config.get(name)
        return found if isinstance(found, dict) else {}

    def size_gb(self, name: str) -> float | None:
        """`memory` or `storage`, which may be given in MB (`memory_mb`) or as text (`memory = "2G"`)."""
        environment = self.section("environment")
        if environment.get(f"{name}_mb"):
            return float(environment[f"{name}_mb"]) / 1024
        text = str(environment.get(name) or "").strip().upper().removesuffix("B").removesuffix("I")
        if not text:
            return None
        try:
            return float(text.rstrip("GMK")) * {"M": 1 / 1024, "K": 1 / 1024**2}.get(text[-1], 1.0)
        except ValueError:
            value = environment[name]
            raise UserError(f"{self.folder}/task.toml: environment.{name} is {value!r}; give it like 2G") from None


def find_tasks(dataset_path: str | Path, names: Sequence[str] | None = None) -> list[HarborTask]:
    """The tasks below a folder, by name. Raises: UserError when there are none, or one that was named is missing."""
    root = Path(dataset_path)
    if not root.is_dir():
        raise UserError(f"{root} is no folder of Harbor tasks")
    folders = {path.parent.name: path.parent for path in sorted(root.rglob("task.toml")) if _is_task(path.parent)}
    missing = sorted(set(names or ()) - set(folders))
    if missing:
        raise UserError(f"{root} has no tasks {missing}; it has {', '.join(folders) or 'none'}")
    chosen = [folders[name] for name in folders if names is None or name in names]
    if not chosen:
        raise UserError(f"{root} has no Harbor tasks: folders with task.toml, instruction.md and tests/test.sh")
    return [read_task(folder) for folder in chosen]


def _is_task(folder: Path) -> bool:
    return (folder / "instruction.md").is_file()


def read_task(folder: Path) -> HarborTask:
    """One task. Raises: UserError for one that cannot be run here."""
    try:
        config = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        instruction = (folder / "instruction.md").read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} cannot be read as a Harbor task: {error}") from error
    if not (folder / "tests" / "test.sh").is_file():
        raise UserError(f"{folder} has no tests/test.sh, so nothing would give a reward")
    if any((folder / "environment" / name).is_file() for name in ("docker-compose.yaml", "docker-compose.yml")):
        raise UserError(f"{folder} wants several containers (docker-compose.yaml); a sandbox here is one machine")
    dockerfile = folder / "environment" / "Dockerfile"
    world = read_dockerfile(dockerfile) if dockerfile.is_file() else TaskWorld()
    task = HarborTask(folder.name, folder, instruction, config, world)
    if task.section("environment").get("gpus"):
        raise UserError(f"{folder}/task.toml wants {task.section('environment')['gpus']} GPUs; a sandbox has none")
    return task


def _seconds(task: HarborTask, section: str) -> float | None:
    value = task.section(section).get("timeout_sec")
    if value is None:
        return None
    if not isinstance(value, int | float) or value <= 0:
        raise UserError(f"{task.folder}/task.toml: {section}.timeout_sec is {value!r}; give seconds")
    return float(value)
