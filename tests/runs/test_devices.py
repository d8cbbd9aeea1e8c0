"""A GPU that a config asks for by name is looked for before a run is made, and no other config pays for that."""

import pytest

from mettle.errors import UserError
from mettle.runs import devices
from mettle.runs.config import RunConfig


def config(**tables):
    return RunConfig.model_validate({"orchestrator": {"envs": [{"id": "reverse-text"}]}, **tables})


ASKED = [
    ({"trainer": {"device": "cuda"}}, "trainer.device 'cuda'"),
    ({"inference": {"device": "cuda"}}, "inference.device 'cuda'"),
    ({"warm_up": {"enabled": True, "sft": {"device": "cuda"}}}, "warm_up.sft.device 'cuda'"),
    ({"trainer": {"weight_broadcast": "nccl"}}, "trainer.weight_broadcast 'nccl'"),
]


@pytest.mark.parametrize(("tables", "said"), ASKED)
def test_a_gpu_that_is_not_there_is_refused(tables, said, monkeypatch):
    monkeypatch.setattr(devices, "drivers_of_torch", list)
    with pytest.raises(
        UserError, match=rf"^{said} was asked for, and torch sees no GPU here \(this build .* for CPUs\)"
    ):
        devices.check_devices(config(**tables))
    monkeypatch.setattr(devices, "drivers_of_torch", lambda: ["cuda"])
    monkeypatch.setattr(devices, "count_gpus", lambda: 0)
    with pytest.raises(UserError, match=r"there is none, or no driver for it"):
        devices.check_devices(config(**tables))
    for count in (1, None):
        monkeypatch.setattr(devices, "count_gpus", lambda count=count: count)
        devices.check_devices(config(**tables))


def test_ranks_on_gpus_have_one_each(monkeypatch):
    monkeypatch.setattr(devices, "drivers_of_torch", lambda: ["cuda"])
    monkeypatch.setattr(devices, "count_gpus", lambda: 1)
    many = {"trainer": {"device": "cuda"}, "deployment": {"num_trainer_ranks": 2}}
    with pytest.raises(UserError, match=r"num_trainer_ranks 2 on trainer\.device 'cuda' .* there is one here"):
        devices.check_devices(config(**many))
    monkeypatch.setattr(devices, "count_gpus", lambda: 2)
    devices.check_devices(config(**many))


def test_nothing_is_looked_for_where_none_is_asked_for(monkeypatch):
    monkeypatch.setattr(devices, "drivers_of_torch", lambda: pytest.fail("it was looked for"))
    devices.check_devices(config())
    devices.check_devices(config(trainer={"device": "cuda"}, deployment={"engine": "ray"}))
    devices.check_devices(config(trainer={"device": "cpu"}, warm_up={"enabled": False, "sft": {"device": "cuda"}}))


def test_gpus_are_counted_without_torch(tmp_path, monkeypatch):
    """The driver's answers, from one that is none: a module that stands in for ctypes in the process that asks."""
    ask = devices._ASK

    def answer(count, failure=0):
        driver = (
            f"class driver:\n    cuInit = staticmethod(lambda flags: {failure})\n"
            f"    cuDeviceGetCount = staticmethod(lambda count: setattr(count, 'value', {count}) or 0)\n"
        )
        plain = ask.replace("import ctypes", "import ctypes; ctypes.byref = lambda count: count")
        monkeypatch.setattr(devices, "_ASK", driver + plain.replace('ctypes.CDLL("libcuda.so.1")', "driver"))
        return devices.count_gpus()

    assert answer(3) == 3
    assert answer(3, failure=100) == 0, "CUDA_ERROR_NO_DEVICE"
    monkeypatch.setattr(devices, "_ASK", ask.replace("libcuda.so.1", "libno_such_driver.so"))
    assert devices.count_gpus() == 0
    monkeypatch.setattr(devices, "_ASK", "import time; time.sleep(60)")
    monkeypatch.setattr(devices, "_TIMEOUT_S", 0.1)
    assert devices.count_gpus() is None
