"""A process that says when it is ready."""

from __future__ import annotations

import json
import sys

import pytest

from mettle.errors import ServiceError
from mettle.processes.managed import ManagedProcess, ProcessSpec, wait_ready


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Starts a module with this source; its ready file is the first argument."""
    started = []
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def start(source: str, ready_timeout_s: float = 100.0) -> ManagedProcess:
        (tmp_path / "program_of_a_test.py").write_text(source)
        ready = tmp_path / "ready.json"
        spec = ProcessSpec("the program", "program_of_a_test", (str(ready),), ready, ready_timeout_s)
        process = ManagedProcess(spec, tmp_path / "logs" / "out")
        started.append(process)
        process.start()
        return process

    yield start
    for process in started:
        process.end(grace_s=0.1)


def test_a_server_is_ready_when_its_file_is_there_and_a_stale_one_does_not_count(program, tmp_path):
    (tmp_path / "ready.json").write_text(json.dumps({"port": 0}))
    may_answer = tmp_path / "may answer"
    process = program(
        "import json, pathlib, sys, time\n"
        f"while not pathlib.Path({str(may_answer)!r}).exists(): time.sleep(0.02)\n"
        "pathlib.Path(sys.argv[1]).write_text(json.dumps({'port': 4}))\n"
        "time.sleep(60)\n"
    )
    assert not process.is_ready()
    may_answer.touch()
    assert wait_ready(process) == {"port": 4}
    process.end()
    assert not process.is_ready()


def test_one_that_ends_before_it_is_ready_is_told_with_its_last_line(program):
    process = program("import sys\nprint('first'); print('error: no such model'); sys.exit(3)\n")
    with pytest.raises(ServiceError, match=r"^the program ended with exit code 3: no such model$"):
        wait_ready(process)


@pytest.mark.parametrize(
    "who", ["error: ", "mettle.trainer: ", "mettle orchestrator: ", "mettle.inference: error: ", ""]
)
def test_what_a_program_calls_itself_is_no_part_of_what_it_says(program, who):
    process = program(
        f"import sys; print('{who}mettle: it is wrong' if not '{who}' else '{who}it is wrong'); sys.exit(3)"
    )
    assert process.wait(100.0) == 3
    assert process.last_line() == "it is wrong"


def test_one_that_is_never_ready_is_told_with_its_time(program):
    with pytest.raises(ServiceError, match="not ready after 0 s"):
        wait_ready(program("import time; time.sleep(60)", ready_timeout_s=0.2))


def test_one_thread_a_process_unless_the_spec_says_otherwise(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    for added, expected in (({}, "1"), ({"OMP_NUM_THREADS": "4"}, "4")):
        output = tmp_path / f"out{expected}"
        process = ManagedProcess(
            ProcessSpec(
                "p", "timeit", ("-n1", "-r1", "import os; print(os.environ['OMP_NUM_THREADS'])"), environment=added
            ),
            output,
        )
        process.start()
        assert process.wait(100.0) == 0, sys.executable
        assert output.read_text().splitlines()[0] == expected
