"""What one rollout walks through: frames from `run_group` to the model call, and files that are executed on the way.

Prints both, so that a change of either is seen; run it alone with `pytest -s tests/envs/journeys/test_walk.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

MAX_FRAMES = 6
"""`run_group`, an attempt, the rollout, its turn, `get_model_response`, and the client's `get_response`."""
MAX_FILES = 15  # 12 is the goal; clock, exact values of rewards, and whose fault a slow call is have a file each
WALK = """
import asyncio, json, sys
from pathlib import Path
import mettle
import mettle.envs as vf
from mettle.clients.base import Client
from mettle.records.messages import Response, ResponseMessage, Usage

SOURCE = str(Path(mettle.__file__).parent) + "/"

class Said(Client):
    base_url = "http://said/v1"
    async def get_response(self, prompt, model, sampling_args=None, tools=None, **extra):
        frame, self.frames = sys._getframe(1), ["Said.get_response"]
        while frame is not None:
            if frame.f_code.co_filename.startswith(SOURCE):
                self.frames.append(frame.f_code.co_qualname)
            frame = frame.f_back
        message = ResponseMessage(content="x", finish_reason="stop", is_truncated=False)
        return Response(id="r", created=0, model=model, usage=Usage(prompt_tokens=1, completion_tokens=1), message=message)

def right(completion, answer):
    return float(completion[-1]["content"] == answer)

%s
rows = [env.get_dataset()[0]]
client, files = Said(), set()

async def walk(is_watched):
    def see(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(SOURCE):
            files.add(frame.f_code.co_filename.removeprefix(SOURCE))
    if is_watched:
        sys.setprofile(see)
    states = await env.run_group(rows, client, "m")
    sys.setprofile(None)
    assert states[0]["reward"] == 1.0, states[0]

for is_watched in (False, False, False, False, True):  # a reward function is tried in a thread a few times
    asyncio.run(walk(is_watched))
print(json.dumps({"frames": client.frames[::-1], "files": sorted(files)}))
"""
PLAIN = 'env = vf.SingleTurnEnv(dataset=[{"question": "q", "answer": "x"}], rubric=vf.Rubric([right]))'
OLDER = """
class Older(vf.SingleTurnEnv):
    async def rollout(self, client, model, prompt, answer="", task="default", info=None, sampling_args=None):
        return await super().rollout(client, model, prompt, answer, task, info, sampling_args)

env = Older(dataset=[{"question": "q", "answer": "x"}], rubric=vf.Rubric([right]))
"""


def walked(environment: str) -> tuple[list[str], list[str]]:
    """The frames and the files of one rollout, in a process of its own: what a class needs is adapted for good."""
    done = subprocess.run([sys.executable, "-c", WALK % environment], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    return seen["frames"], [file for file in seen["files"] if not file.startswith("clients/")]


@pytest.fixture(scope="module")
def plain() -> tuple[list[str], list[str]]:
    return walked(PLAIN)


def test_few_frames_lie_between_a_group_and_its_model_call(plain):
    frames = plain[0]
    print(f"{len(frames)} frames: {' > '.join(frames)}")
    assert len(frames) <= MAX_FRAMES


def test_few_files_are_executed_for_a_rollout_and_none_of_them_is_for_older_releases(plain):
    files = plain[1]
    print(f"{len(files)} files: {', '.join(files)}")
    assert len(files) <= MAX_FILES
    assert not [file for file in files if "legacy" in file]


def test_a_rollout_of_an_older_class_is_the_only_one_that_passes_through_their_layer():
    assert {"envs/legacy/overrides.py", "envs/legacy/parts.py"} <= set(walked(OLDER)[1])
