"""What code sends to its owner is data that was made to hurt: it costs the owner little, and is a verdict."""

from __future__ import annotations

import json
import time

import pytest

from mettle.errors import SandboxError, UserError
from mettle.sandbox import MachineConfig, MachinePool, StdioTest
from mettle.sandbox.judge.comparators import outputs_match
from mettle.sandbox.zygote import frames, values

_HASH_MODULUS = (1 << 61) - 1  # of CPython's integers: all multiples of it have the hash 0
_FAST_CPU_S = 2.0  # each takes hours, or at least ten times as long, where nothing is done about it


@pytest.mark.parametrize("rule", ["floats", "decimals"])
@pytest.mark.parametrize("word", [b"1" * 1_000_000 + b"x", b"1." + b"1" * 1_000_000 + b"e", b"." * 1_000_000])
def test_a_word_that_is_almost_a_number_is_given_up_at_once(rule: str, word: bytes) -> None:
    begun = time.process_time()
    assert not outputs_match(word, b"1.5", StdioTest(compare=rule))
    assert time.process_time() - begun < _FAST_CPU_S


@pytest.mark.parametrize("tag", ["e", "z", "d"])
def test_members_that_were_chosen_to_collide_are_no_value(tag: str) -> None:
    members = [["i", format(number * _HASH_MODULUS, "x")] for number in range(40_000)]
    data = json.dumps([tag, [[one, ["c", None]] for one in members] if tag == "d" else members]).encode()
    begun = time.process_time()
    with pytest.raises(values.UnencodableValue, match="same hash"):
        values.decode(data)
    assert time.process_time() - begun < _FAST_CPU_S


def test_an_honest_set_that_is_large_is_a_value() -> None:
    honest = {*range(-3000, 3000), *map(str, range(3000)), *((number, -1) for number in range(3000)), -1.0, 2.5, True}
    assert values.decode(values.encode(honest)) == honest


def test_a_float_that_is_too_large_for_one_is_no_value() -> None:
    with pytest.raises(values.UnencodableValue):
        values.decode(b'["f","0x1p999999"]')


def test_a_frame_whose_header_nests_too_deep_is_refused_like_any_other() -> None:
    with pytest.raises(ValueError, match="nests"):
        frames.decode_header(b'{"a":' * 50_000 + b"1" + b"}" * 50_000)


@pytest.mark.asyncio(loop_scope="module")
async def test_an_environment_that_is_too_long_ends_nobodys_machine(machines: MachinePool) -> None:
    other = await machines.create()
    with pytest.raises(UserError, match="environment has 70,"):
        await machines.create(MachineConfig(env={"LONG": "x" * 70_000}))
    with pytest.raises(UserError, match="environment has"):
        await machines.create(MachineConfig(env={"LONG": "\x01" * 12_000}))  # \u0001 in an order
    template = machines._keeper.template
    assert template is not None
    with pytest.raises(SandboxError, match="too long"):
        await template._send({"spawn": 1, "machine": "x" * 70_000}, [])
    with pytest.raises(UserError, match="command with its environment"):
        await other.exec("true", env={"LONG": "x" * (1 << 20)})
    assert (await other.exec("echo still here")).stdout == "still here\n"
    await other.delete()
