"""Pieces from whoever has them: what the run is spared, and what a relay that lies, is slow or dies costs."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.inference.outside import relays
from mettle.inference.outside.files import WantedPiece
from mettle.inference.outside.relays import RUN, NoPiece, PieceAnswer, Relays, relay_address

SIZE = relays.RELAYED_BYTES
DATA = {
    hashlib.sha256(one).hexdigest(): one for one in (number.to_bytes(2, "big") * (SIZE // 2) for number in range(40))
}
FOLDER = [WantedPiece(digest, "model.safetensors", SIZE * number, SIZE) for number, digest in enumerate(DATA)]
KINDS = ("honest", "false", "silent", "absent", "slow", "slowly absent")


@pytest.fixture(scope="module")
def one_at_a_time() -> Iterator[None]:
    """The time of these tests has no two that wait at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relays, "AT_ONCE", 1)
        yield


@dataclass
class Net:
    """A run that has every piece, relays of several kinds, and the time that they take."""

    kinds: dict[str, str] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)
    now: float = 0.0
    told: list[str] = field(default_factory=list)

    async def ask(self, base: str, piece: WantedPiece, limit_s: float) -> PieceAnswer:
        await asyncio.sleep(0)
        self.asked[base] += 1
        kind = "honest" if base == RUN else self.kinds[base]
        self.now += {"silent": limit_s, "slow": 0.9 * limit_s, "slowly absent": 0.9 * limit_s}.get(kind, 0.1)
        if kind in ("honest", "slow"):
            return PieceAnswer(DATA[piece.digest])
        return PieceAnswer(fault="absent" if kind == "slowly absent" else kind)  # type: ignore[arg-type]

    def relays(self, own: str = "") -> Relays:
        found = Relays(self.ask, own, self.told.append, lambda: self.now)
        found.know([*self.kinds, own])
        return found


async def fetched(one: Relays, wanted: list[WantedPiece] = FOLDER) -> None:
    """All of a folder, each piece once, as it is."""
    came = [(piece, data) async for piece, data in one.pieces(wanted)]
    assert sorted(piece for piece, _ in came) == sorted(wanted)
    assert all(data == DATA[piece.digest] for piece, data in came)


@given(st.lists(st.sampled_from(KINDS), max_size=5))
@pytest.mark.usefixtures("one_at_a_time")
async def test_a_folder_arrives_whatever_the_relays_are_and_in_bounded_time(kinds: list[str]) -> None:
    net = Net({f"http://10.0.0.{number}:7300": kind for number, kind in enumerate(kinds)})
    await fetched(net.relays())
    bad = sum(kind not in ("honest", "absent") for kind in kinds)
    # Each piece costs .1 s from whoever answers, twice three relays that say they have it not; who is bad, one wait.
    assert net.now <= 0.001 + len(FOLDER) * 0.1 * (2 * relays.MAX_ASKED + 1) + bad * relays.RELAY_S


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("false", "is not asked again: what it hands on is not what was asked for"),
        ("silent", "is not asked for 60 s: it did not answer in time"),
        ("slowly absent", "is not asked for 60 s: it did not answer in time"),
        ("slow", "is not asked for 60 s: it took 9.0 s for what the run hands over sooner"),
    ],
)
@pytest.mark.usefixtures("one_at_a_time")
async def test_a_bad_relay_is_left_out_and_told_of(kind: str, why: str) -> None:
    bad = "http://10.0.0.1:7300"
    net = Net({bad: kind})
    one = net.relays("http://10.0.0.9:7300")
    await fetched(one)
    assert net.asked[bad] == 1
    assert net.asked[RUN] == len(FOLDER) - (kind == "slow")
    assert net.told == [f"the relay at {bad} {why}"]
    net.now += 61.0
    await fetched(one)
    assert net.asked[bad] == (1 if kind == "false" else 2)
    net.now += 61.0
    await fetched(one)
    assert net.asked[bad] == (1 if kind == "false" else 2), "the second time it is left out for longer"


async def test_what_the_run_has_no_more_ends_the_fetching() -> None:
    async def ask(base: str, piece: WantedPiece, limit_s: float) -> PieceAnswer:
        return PieceAnswer(fault="absent")

    one = Relays(ask)
    one.know(["http://10.0.0.1:7300"])
    with pytest.raises(NoPiece, match="nobody has piece"):
        await fetched(one)


async def test_small_pieces_are_asked_of_the_run_and_several_at_once() -> None:
    asked: Counter[str] = Counter()
    at_once, most = 0, 0

    async def ask(base: str, piece: WantedPiece, limit_s: float) -> PieceAnswer:
        nonlocal at_once, most
        asked[base] += 1
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0)
        at_once -= 1
        return PieceAnswer(DATA[piece.digest])

    one = Relays(ask)
    one.know(["http://10.0.0.1:7300"])
    await fetched(one, [piece._replace(num_bytes=100) for piece in FOLDER])
    assert (dict(asked), most) == ({RUN: len(FOLDER)}, relays.AT_ONCE)


@pytest.mark.parametrize("num_workers", [2, 4, 8])
async def test_workers_that_begin_at_once_take_little_more_than_one_copy_from_the_run(num_workers: int) -> None:
    names = [f"http://10.0.0.{number}:7300" for number in range(num_workers)]
    has: dict[str, set[str]] = {name: set() for name in names}
    from_run: list[str] = []

    async def ask(base: str, piece: WantedPiece, limit_s: float) -> PieceAnswer:
        await asyncio.sleep(0)
        if base == RUN:
            from_run.append(piece.digest)
        return (
            PieceAnswer(DATA[piece.digest]) if base == RUN or piece.digest in has[base] else PieceAnswer(fault="absent")
        )

    async def work(name: str) -> None:
        one = Relays(ask, name)
        one.know(names)
        async for piece, _ in one.pieces(FOLDER):
            has[name].add(piece.digest)

    await asyncio.gather(*(work(name) for name in names))
    assert all(len(found) == len(FOLDER) for found in has.values())
    assert len(from_run) <= 1.5 * len(FOLDER), "without relays it is a copy for each worker"


@pytest.mark.parametrize(
    ("told", "address"),
    [
        ("http://10.0.0.7:7300", "http://10.0.0.7:7300"),
        ("http://10.0.0.7:7300/", "http://10.0.0.7:7300"),
        ("https://pieces.example", "https://pieces.example"),
        ("http://[::1]:7300", "http://[::1]:7300"),
        ("http://10.0.0.7:7300/reboot?", None),
        ("http://10.0.0.7:7300?now", None),
        ("http://10.0.0.7:7300#now", None),
        ("http://ann:secret@10.0.0.7", None),
        ("http://10.0.0.7:seven", None),
        ("file:///etc/passwd", None),
        ("http://", None),
        ("", None),
    ],
)
def test_an_address_of_a_relay_has_nothing_after_its_port(told: str, address: str | None) -> None:
    assert relay_address(told) == address
