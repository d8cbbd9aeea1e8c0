"""A run with a door for workers from outside, and the workers that a test sends there, as processes of their own."""

import subprocess
import sys
from pathlib import Path

from stories import CONFIG, Run, environment

from mettle.inference.outside.door_file import DOOR_FILE, read_door
from mettle.inference.outside.roster import OutsideWorker, read_roster
from mettle.runs.outside import invite_worker

OPEN = CONFIG + "\n[inference.outside]\nmax_lag = 3\nlease_s = 5\n"
STEPS = 120
LIAR = Path(__file__).parent / "lying_worker.py"


class OutsideStory:
    """A run with a door, and the workers that a test sends there."""

    def __init__(self, folder: Path, *, text: str = OPEN, steps: int = STEPS) -> None:
        self.run = Run(folder, steps=steps, text=text)
        self.folder = folder
        self.workers: list[subprocess.Popen[str]] = []

    def send(self, name: str, *options: str, is_liar: bool = False) -> subprocess.Popen[str]:
        """A worker, in the network namespace of this thread."""
        self.run.wait_for(lambda _: (self.run.run_dir.outside / DOOR_FILE).exists())
        token = invite_worker(self.run.run_dir, name).token
        url = str(read_door(self.run.run_dir.outside)["url"])
        command = [str(LIAR), url, token] if is_liar else ["-m", "mettle.cli", "rl", "work", url, "--token", token]
        place = [str(self.folder / name)] if is_liar else ["--dir", str(self.folder / name), *options]
        self.workers.append(
            subprocess.Popen(
                [sys.executable, *command, *place], env=environment(), text=True, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
        return self.workers[-1]

    def known(self, name: str) -> OutsideWorker | None:
        return next((one for one in read_roster(self.run.run_dir.outside) if one.name == name), None)

    def worked(self, name: str) -> None:
        """Until something of a worker was used."""
        self.run.wait_for(lambda _: self.sampled(name) > 0)

    def busy(self, name: str) -> None:
        """Until a worker has something that it has not answered."""
        self.run.wait_for(lambda _: (one := self.known(name)) is not None and one.taken > one.sampled + one.returned)

    def state(self, name: str) -> str:
        """Whether a worker is `here`, `gone` or `banned`."""
        return "unknown" if (one := self.known(name)) is None else one.state

    def sampled(self, name: str) -> int:
        """Completions of a worker that were used."""
        return 0 if (one := self.known(name)) is None else one.sampled

    def events(self, kind: str) -> list[str]:
        return self.run.read(lambda ledger: [event.message for event in ledger.journal.events(kind=kind)], [])

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait()
            assert worker.stdout is not None
            worker.stdout.close()
        self.run.close()
