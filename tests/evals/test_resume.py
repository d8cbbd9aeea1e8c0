"""Going on after an interruption: real processes that are killed, full disks, files that were cut or changed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from tests.serving import handler_on_a_thread

import mettle.envs as vf
from mettle.errors import UserError
from mettle.evals.entries import is_stored
from mettle.evals.reader import EvaluationReader
from mettle.evals.results import publish
from mettle.storage.claim import FolderClaim

NUM_TASKS, NUM_ROLLOUTS = 60, 4
ENVIRONMENT = f"""
import mettle.envs as vf


def correct(completion, answer):
    return float(completion[-1]["content"] == answer)


def load_environment():
    rows = [{{"question": f"say {{i}}", "answer": str(i)}} for i in range({NUM_TASKS})]
    return vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric([correct]))
"""
START = "import sys; from mettle.cli.main import main; main(sys.argv[1:])"
LIMITED = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000)); {START}"


class Counting(BaseHTTPRequestHandler):
    """Chat completions that repeat the last word, after a while; every request is counted by its word."""

    asked: Counter[str]
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        word = body["messages"][-1]["content"].split()[-1]
        type(self).asked[word] += 1
        time.sleep(0.02)
        choice = {"index": 0, "message": {"role": "assistant", "content": word}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
        data = json.dumps({"id": "x", "created": 1, "model": "m", "choices": [choice], "usage": usage}).encode()
        try:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            self.close_connection = True  # The client was killed.

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def endpoint() -> Iterator[tuple[str, Counter[str]]]:
    """An endpoint that counts."""
    Counting.asked = Counter()
    with handler_on_a_thread(Counting) as url:
        yield f"{url}/v1", Counting.asked


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A folder with one environment."""
    folder = tmp_path / "environments" / "echo_words"
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text('[project]\nname = "echo-words"\nversion = "0.1.0"\n')
    (folder / "echo_words.py").write_text(ENVIRONMENT)
    return tmp_path


def start(workspace: Path, *words: object, code: str = START) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, "eval", "run", *map(str, words)],
        cwd=workspace, env={**os.environ, "XDG_STATE_HOME": str(workspace)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finished(folder: Path) -> Counter[str]:
    """Rollouts that are on disk, by the word of their task."""
    return Counter(row["answer"] for row in EvaluationReader(folder).rows()) if is_stored(folder) else Counter()


def kill_after(process: subprocess.Popen[str], url: str, asked: Counter[str], num_requests: int) -> bool:
    """Kill -9 when the endpoint has been asked this often; False when the process ended before."""
    goal = sum(asked.values()) + num_requests
    deadline = time.monotonic() + 300
    while process.poll() is None and sum(asked.values()) < goal:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    is_running = process.poll() is None
    process.kill()
    _, err = process.communicate()
    assert is_running or process.returncode == 0, err
    until_all_is_counted(url)
    return is_running


def until_all_is_counted(url: str) -> None:
    """Wait until the endpoint has counted what it had been sent by a process that is gone."""
    with contextlib.suppress(HTTPError):  # it takes no GET; by then the connections before this one have their threads
        urlopen(url, timeout=100).close()
    deadline = time.monotonic() + 100
    while any("process_request_thread" in thread.name for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.e2e
def test_an_evaluation_killed_again_and_again_repeats_no_finished_rollout(workspace, endpoint):
    url, asked = endpoint
    rng = random.Random(11)
    words = ("echo-words", "-m", "m", "-b", url, "-n", NUM_TASKS, "-r", NUM_ROLLOUTS, "-c", 6, "-o", "out")
    process = start(workspace, *words)
    allowed = Counter({str(i): NUM_ROLLOUTS for i in range(NUM_TASKS)})
    repeated = num_kills = 0
    is_killed = True
    while is_killed:
        before = Counter(asked)
        is_killed = kill_after(process, url, asked, rng.randint(1, 90))
        repeated += sum((asked - before - allowed).values())
        (folder,) = (workspace / "out").glob("*/*")
        allowed = Counter({str(i): NUM_ROLLOUTS for i in range(NUM_TASKS)}) - finished(folder)
        if is_killed:
            num_kills += 1
            entry = EvaluationReader(folder).entry
            assert (entry.state, entry.planned_rollouts) == ("running", NUM_TASKS * NUM_ROLLOUTS)
            assert entry.num_rollouts == sum(finished(folder).values())
            if num_kills == 2:  # as if it had happened in the middle of a block
                with (folder / "rollouts" / "shard-00000.bin").open("ab") as file:
                    file.write(b'\x20\x01\0\0\0\0\0\0{"draw": [-1,')
            process = start(workspace, "--resume", folder)
    assert num_kills >= 3
    assert repeated == 0
    assert finished(folder) == Counter({str(i): NUM_ROLLOUTS for i in range(NUM_TASKS)})
    metadata = json.loads((folder / "metadata.json").read_text())
    assert (metadata["avg_reward"], metadata["num_examples"]) == (1.0, NUM_TASKS)
    lost = sum(asked.values()) - NUM_TASKS * NUM_ROLLOUTS
    assert lost <= 6 * num_kills, "only what was in flight at a kill is asked again"
    sys.stderr.write(f"kills {num_kills}, finished rollouts repeated {repeated}, in flight at a kill {lost}\n")


@pytest.mark.e2e
def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(workspace, endpoint):
    url, asked = endpoint
    words = ("echo-words", "-m", "m", "-b", url, "-n", NUM_TASKS, "-r", 2, "-c", 4, "-o", "out")
    process = start(workspace, *words)
    while sum(asked.values()) < 30:
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    (folder,) = (workspace / "out").glob("*/*")
    assert process.returncode == 130
    assert err.splitlines()[-1].endswith(f"eval run --resume {folder.relative_to(workspace)}` runs what is missing")
    assert "Traceback" not in err
    num_done = sum(finished(folder).values())
    assert 26 <= num_done < NUM_TASKS * 2
    metadata = json.loads((folder / "metadata.json").read_text())
    assert metadata["avg_reward"] == 1.0
    assert sum(finished(folder).values()) == num_done, "the metadata describes the rows"


@pytest.mark.e2e
def test_a_full_disk_keeps_what_was_written_and_says_how_to_go_on(workspace, endpoint):
    url, asked = endpoint
    words = ("echo-words", "-m", "m", "-b", url, "-n", NUM_TASKS, "-r", 2, "-o", "out")
    process = start(workspace, *words, code=LIMITED)
    _, err = process.communicate(timeout=100)
    (folder,) = (workspace / "out").glob("*/*")
    assert process.returncode == 2
    last = err.splitlines()[-1]
    assert "; make room, then `" in last
    assert last.endswith(f"eval run --resume {folder.relative_to(workspace)}` goes on")
    done = finished(folder)
    assert 0 < sum(done.values()) < NUM_TASKS * 2
    assert EvaluationReader(folder).num_broken == 0
    before = Counter(asked)
    process = start(workspace, "--resume", folder, "--json")
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert json.loads(out)["stats"]["num_rollouts"] == NUM_TASKS * 2
    assert asked - before == Counter({str(i): 2 for i in range(NUM_TASKS)}) - done


ROWS = [{"question": f"q{i}", "answer": str(i)} for i in range(4)]


def make(rows=ROWS, **fields):
    return vf.SingleTurnEnv(**{"eval_dataset": rows, "rubric": vf.Rubric([right]), "env_id": "toy", **fields})


def only_published(folder: Path) -> Path:
    """As another program, or a release without a store, leaves its folder; the file of rows."""
    shutil.rmtree(folder / "rollouts")
    for file in folder.glob("run.db*"):
        file.unlink()
    return folder / "results.jsonl"


def right(completion, answer):
    return float(completion[-1]["content"] == answer)


def question(prompt):
    return prompt[-1]["content"].removeprefix("q")


async def test_what_a_resumed_evaluation_keeps_is_byte_for_byte_what_was_written(scripted, tmp_path):
    await make().evaluate(scripted(question), "m", results_path=tmp_path)
    file = only_published(tmp_path)
    lines = file.read_bytes().splitlines(keepends=True)
    failed = json.dumps({**json.loads(lines[1]), "reward": None, "error": {"error": "ModelError"}}).encode() + b"\n"
    file.write_bytes(lines[0] + failed + b"not json\n" + lines[2] + lines[3].rstrip(b"\n"))
    client = scripted(question)
    await make().evaluate(client, "m", results_path=tmp_path)
    assert [question(call["prompt"]) for call in client.calls] == ["1"], "a whole last line without its end is kept"
    assert file.read_bytes().splitlines(keepends=True)[:3] == [lines[0], lines[2], lines[3]]


async def test_a_dataset_that_changed_is_noticed(scripted, tmp_path):
    await make().evaluate(scripted(question), "m", results_path=tmp_path)
    saved = only_published(tmp_path).read_bytes()
    changed = [ROWS[0], {"question": "q1", "answer": "2"}, *ROWS[2:]]
    for rows, what in ((changed, "examples 1 now"), (ROWS[1:] + ROWS[:1], "examples 0, 1, 2, ... now")):
        client = scripted(question)
        with pytest.raises(UserError, match=f"dataset has changed since .* of other tasks than {what}"):
            await make(rows).evaluate(client, "m", results_path=tmp_path)
        assert client.calls == []
    assert (tmp_path / "results.jsonl").read_bytes() == saved


async def test_files_without_task_keys_are_resumed_by_example(scripted, tmp_path):
    await make().evaluate(scripted(question), "m", results_path=tmp_path)
    file = only_published(tmp_path)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({k: v for k, v in row.items() if k != "task_key"}) + "\n" for row in rows[:3]))
    client = scripted(question)
    await make().evaluate(client, "m", results_path=tmp_path)
    assert len(client.calls) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_examples": 2}, "its num_examples is 4, this evaluation's is 2"),
        ({"sampling_args": {"temperature": 1.0}}, "its sampling_args.temperature is 0.5, this evaluation's is 1.0"),
        ({"rollouts_per_example": 2}, "its rollouts_per_example is 1"),
        ({"shuffle": True}, "its shuffle is False"),
    ],
)
async def test_an_evaluation_with_other_settings_is_refused_in_one_line(scripted, tmp_path, change, message):
    settings = {"sampling_args": {"temperature": 0.5}, "results_path": tmp_path}
    await make().evaluate(scripted(question), "m", **settings)
    with pytest.raises(UserError, match=message) as raised:
        await make().evaluate(scripted(question), "m", **{**settings, **change})
    assert "\n" not in str(raised.value)


async def test_other_arguments_are_refused_and_more_examples_are_not(scripted, tmp_path):
    await make(env_args={"level": 1}).evaluate(scripted(question), "m", num_examples=2, results_path=tmp_path)
    with pytest.raises(UserError, match=r"its env_args\.level is 1, this evaluation's is 2"):
        await make(env_args={"level": 2}).evaluate(scripted(question), "m", num_examples=2, results_path=tmp_path)
    client = scripted(question)
    await make(env_args={"level": 1}).evaluate(client, "m", results_path=tmp_path)
    assert len(client.calls) == 2


async def test_rows_without_metadata_are_not_written_over(scripted, tmp_path):
    (tmp_path / "results.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"has rows and no metadata\.json beside it"):
        await make().evaluate(scripted(question), "m", results_path=tmp_path)


async def test_metadata_that_cannot_be_read_is_one_line(scripted, tmp_path):
    await make().evaluate(scripted(question), "m", results_path=tmp_path)
    only_published(tmp_path)
    (tmp_path / "metadata.json").write_text('{"env_id": ')
    with pytest.raises(UserError, match=r"metadata\.json cannot be read"):
        await make().evaluate(scripted(question), "m", results_path=tmp_path)


def test_two_processes_do_not_write_to_one_folder(scripted, tmp_path):
    claim = FolderClaim(tmp_path)
    code = (
        "import sys; from pathlib import Path; from mettle.evals.folder import EvaluationFolder\n"
        "EvaluationFolder(Path(sys.argv[1]))"
    )
    other = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert "is being written to by another process" in other.stderr
    claim.release()
    make().evaluate_sync(scripted(question), "m", results_path=tmp_path)


async def test_a_rollout_whose_block_is_damaged_is_run_again(scripted, tmp_path):
    await make().evaluate(scripted(question), "m", results_path=tmp_path, max_concurrent=1)
    shard = tmp_path / "rollouts" / "shard-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-9])
    assert len(list(EvaluationReader(tmp_path).rows())) == 3
    client = scripted(question)
    results = await make().evaluate(client, "m", results_path=tmp_path)
    assert [question(call["prompt"]) for call in client.calls] == ["3"]
    assert len(results.outputs) == len(list(EvaluationReader(tmp_path).rows())) == 4


async def test_published_files_that_were_taken_in_are_read_from_the_store_and_say_the_same(scripted, tmp_path):
    await make().evaluate(scripted(question), "m", num_examples=3, results_path=tmp_path)
    file = only_published(tmp_path)
    rows = [json.loads(line) | {"of_another_program": [1]} for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert list(EvaluationReader(tmp_path).rows()) == rows
    await make().evaluate(scripted(question), "m", results_path=tmp_path)
    reader = EvaluationReader(tmp_path)
    assert (reader.eval_id, reader.entry.state, len(reader)) == (1, "finished", 4)
    published = [json.loads(line) for line in file.read_text().splitlines()]
    assert published[:3] == rows == list(reader.rows())[:3]


async def test_an_evaluation_of_a_run_is_published_where_one_wants_it(scripted, tmp_path):
    await make().evaluate(scripted(question), "m", results_path=tmp_path / "a")
    reader = EvaluationReader(tmp_path / "a")
    file = publish(reader, tmp_path / "b")
    assert file.read_bytes() == (tmp_path / "a" / "results.jsonl").read_bytes()
    again = EvaluationReader(tmp_path / "b")
    assert again.eval_id is None
    assert (again.metadata["env_id"], list(again.rows())) == ("toy", list(reader.rows()))
    assert [path.name for path in sorted((tmp_path / "b").iterdir())] == ["metadata.json", "results.jsonl"]
