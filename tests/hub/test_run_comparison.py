"""Runs beside each other: curves of each, settings in which they differ, and who may see which."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.hub.conftest import write_finished

from mettle.hub.run_comparison import MAX_RUNS, differing_settings

SETTINGS = st.dictionaries(st.sampled_from("abcdef"), st.sampled_from(["1", "2"]), max_size=6)


@given(st.lists(SETTINGS, min_size=2, max_size=4))
def test_a_setting_is_shown_exactly_when_two_runs_do_not_have_it_alike(runs):
    shown = {row.key: row.values for row in differing_settings(runs)}
    for key in {key for run in runs for key in run}:
        values = [run.get(key) for run in runs]
        assert (key in shown) == (len(set(values)) > 1)
        assert shown.get(key, values) == values


@pytest.fixture
def folder(tmp_path):
    write_finished(tmp_path / "one", steps=3, groups=2)
    write_finished(tmp_path / "two", steps=5, groups=2, seed=3)
    toml = tmp_path / "two" / "run.toml"
    toml.write_text(toml.read_text().replace("lr = 3e-4", "lr = 1e-4\nwarmup_steps = 2"))
    return tmp_path


async def test_curves_and_differing_settings_of_two_runs_are_on_one_page(browse, folder):
    html = (await browse(folder).get("/compare-runs?r=one&r=two")).text
    data = json.loads(re.search(r'id="charts-data">(.*?)</script>', html, re.S)[1])
    assert [len(run["steps"]) for run in data["runs"]] == [3, 5]
    reward = next(chart for chart in data["charts"] if chart["id"] == "reward")
    assert [(line["key"], line["label"]) for line in reward["series"]] == [
        ("reward_mean:0", "one"), ("reward_mean:1", "two"),
    ]  # fmt: skip
    assert all(value is not None for value in data["runs"][1]["columns"]["reward_mean"])
    keys = re.findall(r'<tr><td class="mono">([^<]+)</td>', html)
    assert set(keys) == {"max_steps", "trainer.optim.lr", "trainer.optim.warmup_steps"}
    assert "not set" in html


async def test_too_few_too_many_and_unknown_runs_are_refused_in_words(browse, folder):
    client = browse(folder)
    for query, status in (
        ("", 422), ("r=one", 422), ("r=one&r=one", 422), ("r=one&r=gone", 404), ("r=one&r=../one", 404),
        ("&".join(f"r={number}" for number in range(MAX_RUNS + 1)), 422),
    ):  # fmt: skip
        answer = await client.get(f"/compare-runs?{query}")
        assert answer.status_code == status, query
        assert "<h1" in answer.text


async def test_the_list_offers_runs_to_choose_where_there_are_two(browse, folder, tmp_path_factory):
    html = (await browse(folder).get("/")).text
    assert html.count('type="checkbox" form="choose"') == 2
    alone = tmp_path_factory.mktemp("alone")
    write_finished(alone / "one", steps=1, groups=2)
    assert 'form="choose"' not in (await browse(alone).get("/")).text


def test_a_hosted_run_is_compared_by_those_alone_whose_it_is(hub):
    body = {"model": "tiny", "environments": [{"id": "reverse-text"}], "batch_size": 32}
    bob = hub.signed_in("bob")
    ids = [bob.post("/api/v1/rft/runs", json=body).json()["run"]["id"] for _ in range(2)]
    for each in ids:
        write_finished(hub.lab.folder / "runs" / each, steps=2, groups=2)
    address = f"/compare-runs?r={ids[0]}&r={ids[1]}"
    assert bob.get(address).status_code == 200
    assert hub.signed_in("eve").get(address).status_code == 404
    assert hub.anonymous().get(address, follow_redirects=False).status_code == 303
