"""Which adapters and versions there are: by name, newest last, and never more than there may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from mettle.inference.engine.protocol import GenerationRequest, RequestRefused, WeightsRejected
from mettle.inference.engine.served_adapters import ServedAdapters
from mettle.records.sampling import SamplingParams


def asking(adapter: str, version: int | None = None) -> GenerationRequest:
    return GenerationRequest("1", [1], SamplingParams(), adapter=adapter, adapter_version=version)


def test_the_newest_version_is_the_one_that_was_put_last() -> None:
    served = ServedAdapters[str](max_versions=2)
    for version in (3, 4, 5, 4):
        served.put("a", Path("p"), 8, version, f"weights {version}")
    (status,) = served.statuses()
    assert (status.versions, status.newest, status.rank) == ((5, 4), 4, 8)
    assert served.units() == {("a", 5), ("a", 4)}
    assert served.next_version("a") == 6
    with pytest.raises(RequestRefused, match="v3 of 'a' is not served; v5, v4 are"):
        served.check(asking("a", 3))


def test_who_chose_the_newest_goes_along_and_who_pinned_one_keeps_it() -> None:
    served = ServedAdapters[str](max_versions=1)
    served.put("a", Path("p"), 8, 0, "old")
    newest, pinned = served.choose(asking("a")), served.choose(asking("a", 0))
    assert newest is not None
    assert pinned is not None
    served.put("a", Path("p"), 8, 1, "new")
    served.remove("a")
    assert (newest.unit, newest.weights) == (("a", 1), "new")
    assert (pinned.unit, pinned.weights) == (("a", 0), "old")
    assert served.choose(asking("")) is None
    with pytest.raises(RequestRefused, match="not served"):
        served.choose(asking("a"))


def test_a_number_is_not_given_twice_even_after_unloading() -> None:
    served = ServedAdapters[str]()
    served.put("a", Path("p"), 8, served.next_version("a"), "one")
    served.remove("a")
    assert served.next_version("a") == 1


def test_one_adapter_too_many_is_refused_and_a_version_of_a_known_one_is_not() -> None:
    served = ServedAdapters[str](max_adapters=1)
    served.put("a", Path("p"), 8, 0, "one")
    served.put("a", Path("p"), 8, 1, "two")
    with pytest.raises(WeightsRejected, match="1 adapters are served and no more"):
        served.put("b", Path("p"), 8, 0, "one")
