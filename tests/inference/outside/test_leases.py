"""Leases on a clock that the test turns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.inference.outside.leases import LeaseBook


@pytest.fixture
def book() -> LeaseBook:
    return LeaseBook(lease_s=30.0, max_lease_s=100.0)


def test_a_request_has_one_holder_and_is_answered_once(book: LeaseBook) -> None:
    book.offer("r", 4, 0.0)
    assert book.take("ann", 8, 0.0) == ["r"]
    assert book.take("bob", 8, 0.0) == []
    assert not book.claim("bob", "r")
    assert book.claim("ann", "r")
    assert not book.claim("ann", "r")


def test_only_what_there_is_room_for_is_taken_the_oldest_first(book: LeaseBook) -> None:
    for number in range(4):
        book.offer(f"r{number}", 4, float(number))
    assert book.take("ann", 9, 5.0) == ["r0", "r1"]
    assert (book.num_leased, book.num_waiting) == (8, 8)


def test_what_does_not_fit_a_holder_waits_for_another(book: LeaseBook) -> None:
    book.offer("r", 1, 0.0)
    assert book.take("ann", 8, 0.0, lambda request_id: False) == []
    assert book.take("bob", 8, 0.0) == ["r"]


def test_a_silent_holder_loses_its_requests_and_one_that_speaks_keeps_them(book: LeaseBook) -> None:
    book.offer("r", 1, 0.0)
    book.offer("s", 1, 0.0)
    book.take("ann", 2, 0.0)
    assert book.renew("ann", ["r"], 29.0) == []
    assert [lease.request_id for lease in book.expired(31.0)] == ["s"]
    assert not book.claim("ann", "s")
    assert book.renew("ann", ["r", "s"], 32.0) == ["s"]


def test_no_holder_keeps_a_request_for_ever(book: LeaseBook) -> None:
    book.offer("r", 1, 0.0)
    book.take("ann", 1, 0.0)
    for now in range(0, 100, 10):
        book.renew("ann", ["r"], float(now))
    assert [lease.request_id for lease in book.expired(101.0)] == ["r"]


def test_an_answer_that_is_being_checked_does_not_run_out(book: LeaseBook) -> None:
    book.offer("r", 1, 0.0)
    book.take("ann", 1, 0.0)
    book.claim("ann", "r")
    assert book.expired(1000.0) == []
    assert book.num_leased == 1


def test_what_nobody_takes_goes_back(book: LeaseBook) -> None:
    book.offer("r", 1, 0.0)
    assert book.untaken(0.5, 1.0) == []
    assert book.untaken(1.5, 1.0) == ["r"]
    assert book.take("ann", 9, 2.0) == []


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["offer", "take", "claim", "renew", "expire", "forget"]), st.integers(0, 5), st.booleans()
    ),
    max_size=60,
)


@given(MOVES)
def test_no_request_is_answered_twice_nor_held_by_two(moves: list[tuple[str, int, bool]]) -> None:
    book, now, offered, answered = LeaseBook(3.0, 9.0), 0.0, set[str](), list[str]()
    for move, number, is_ann in moves:
        now += 1.0
        request_id, holder = f"r{number}", "ann" if is_ann else "bob"
        match move:
            case "offer" if request_id not in offered:
                offered.add(request_id)
                book.offer(request_id, 1, now)
            case "take":
                assert not {*book.take(holder, number, now)} & {*answered}
            case "claim":
                is_holder = request_id in book.held_by(holder)
                assert book.claim(holder, request_id) == is_holder
                answered += [request_id] * is_holder
            case "renew":
                book.renew(holder, [request_id], now)
            case "expire":
                book.expired(now)
            case "forget":
                book.forget(request_id)
        assert not {*book.held_by("ann")} & {*book.held_by("bob")}
    assert len(answered) == len(set(answered))
