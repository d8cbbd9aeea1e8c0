"""A processor that announces tiles and does not say how large they are is not asked for any."""

import os
import platform

import pytest

from mettle.processes import amx


@pytest.fixture
def host(tmp_path, monkeypatch):
    monkeypatch.delenv(amx.VARIABLE, raising=False)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")

    def made(flags, palette):
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: fpu {flags} sse\n")
        monkeypatch.setattr(amx, "_CPUINFO", tmp_path / "cpuinfo")
        monkeypatch.setattr(amx, "cpuid", lambda leaf: (palette if leaf == 0x1D else 1, 0, 0, 0))

    return made


@pytest.mark.parametrize(
    ("flags", "palette", "found"),
    [("amx_tile amx_bf16", 0, amx.BELOW_AMX), ("amx_tile amx_bf16", 1, None), ("avx512_bf16", 0, None)],
    ids=["tiles without a size", "tiles", "no tiles"],
)
def test_tiles_are_avoided_where_they_cannot_work(host, flags, palette, found):
    host(flags, palette)
    amx.avoid_unusable_amx()
    assert os.environ.get(amx.VARIABLE) == found


def test_what_a_person_has_set_stays(host, monkeypatch):
    host("amx_tile", 0)
    monkeypatch.setenv(amx.VARIABLE, "AVX2")
    amx.avoid_unusable_amx()
    assert os.environ[amx.VARIABLE] == "AVX2"


def test_where_nobody_may_ask_tiles_are_taken_to_work(host, monkeypatch):
    def refuse(leaf):
        raise PermissionError("no")

    host("amx_tile", 0)
    monkeypatch.setattr(amx, "cpuid", refuse)
    amx.avoid_unusable_amx()
    assert amx.VARIABLE not in os.environ


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have no cpuid")
def test_the_processor_answers():
    highest, b, c, d = amx.cpuid(0)
    vendor = b"".join(register.to_bytes(4, "little") for register in (b, d, c))
    assert highest >= 1
    assert vendor.isascii()
    assert vendor.strip(b"\0 ")
