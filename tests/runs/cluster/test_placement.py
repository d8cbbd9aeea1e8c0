"""What a run needs of a cluster, and the one line with which a cluster without room is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.errors import UserError
from mettle.runs.cluster.placement import NodeBundle, NodeRoom, place, placement_of
from mettle.runs.config import RunConfig


def config(envs=({"id": "reverse-text"},), **deployment):
    ray = deployment.pop("ray", {})
    inference = deployment.pop("inference", {"replicas": deployment.pop("replicas", 1)})
    return RunConfig.model_validate(
        {
            "orchestrator": {"envs": envs},
            "inference": inference,
            "deployment": {"engine": "ray", "ray": ray, **deployment},
        }
    )


def test_what_writes_the_run_is_placed_with_its_owner():
    placement = placement_of(config(num_trainer_ranks=3, replicas=2))
    assert {name: len(pool) for name, pool in placement.pools.items()} == {
        "owner": 1, "trainer": 3, "replica-0": 1, "replica-1": 1,
    }  # fmt: skip
    assert [b.process for b in placement.bundles if b.is_pinned] == ["owner", "trainer"]


def test_ranks_stand_close_together_and_engines_apart():
    nodes = [NodeRoom("a", 4, 0, is_owner=True), NodeRoom("b", 4, 0), NodeRoom("c", 4, 0)]
    found = place(placement_of(config(num_trainer_ranks=3, replicas=2)).bundles, nodes)
    assert {found["trainer"].name, found["trainer-1"].name, found["trainer-2"].name} == {"a"}
    assert {found["replica-0"].name, found["replica-1"].name} == {"b", "c"}


def test_places_for_workers_stand_apart_and_need_not_be_with_the_owner():
    nodes = [NodeRoom("a", 2, 0, is_owner=True), NodeRoom("b", 4, 0), NodeRoom("c", 4, 0)]
    wanted = placement_of(config(ray={"num_worker_places": 2, "cpus_per_worker_place": 2.5}))
    assert [str(wanted.pools[name][0]) for name in ("workers-0", "workers-1")] == [
        "workers-0 (2.5 CPU)", "workers-1 (2.5 CPU)",
    ]  # fmt: skip
    found = place(wanted.bundles, nodes)
    assert {found["workers-0"].name, found["workers-1"].name} == {"b", "c"}
    with pytest.raises(UserError, match=r"no room for workers-1 \(2\.5 CPU\) once 3 others are placed"):
        place(wanted.bundles, nodes[:2])


def test_places_that_would_stand_empty_or_mean_nothing_are_refused():
    ray = {"num_worker_places": 3}
    for envs in ([{"id": "reverse-text", "workers": 2}], [{"id": "reverse-text", "workers": 0}]):
        with pytest.raises(ValueError, match=r"num_worker_places 3 is more than the [02] workers"):
            config(envs, ray=ray)
    assert config([{"id": "reverse-text", "workers": 2}, {"id": "word-count"}], ray=ray)
    for name, value in {"num_worker_places": 1, "worker_variables": ["OPENAI_API_KEY"]}.items():
        with pytest.raises(ValueError, match=rf"deployment\.ray\.{name} is of deployment.engine 'ray'"):
            config(engine="local", ray={name: value})
    with pytest.raises(ValueError, match=r"worker_variables go to workers in places"):
        config(ray={"worker_variables": ["OPENAI_API_KEY"]})
    with pytest.raises(ValueError, match=r"inference\.host '0\.0\.0\.0'"):
        config(ray=ray, inference={"host": "0.0.0.0"})
    with pytest.raises(ValueError, match=r"orchestrator\.worker_places is the run's own"):
        RunConfig.model_validate({"orchestrator": {"envs": [{"id": "reverse-text"}], "worker_places": ["a.json"]}})


def test_the_refusal_says_what_has_no_room_and_what_there_is():
    nodes = [NodeRoom("a", 8, 1, is_owner=True), NodeRoom("b", 8, 0)]
    wanted = placement_of(config(ray={"gpus_per_rank": 1, "gpus_per_replica": 1}))
    with pytest.raises(UserError) as refused:
        place(wanted.bundles, nodes)
    said = str(refused.value)
    assert "no room for replica-0 (1 CPU and 1 GPU)" in said
    assert "a (the owner) 8 CPU and 1 GPU, b 8 CPU" in said
    assert "\n" not in said


counts = st.integers(0, 6).map(float)


@given(st.lists(st.tuples(counts, counts), min_size=1, max_size=4), st.lists(st.tuples(counts, counts), max_size=6))
def test_no_node_is_given_more_than_it_has(rooms, wants):
    nodes = [NodeRoom(str(n), cpus, gpus, is_owner=n == 0) for n, (cpus, gpus) in enumerate(rooms)]
    bundles = [NodeBundle(f"replica-{n}", cpus, gpus, is_pinned=n == 0) for n, (cpus, gpus) in enumerate(wants)]
    try:
        found = place(bundles, nodes)
    except UserError:
        assert wants
        return
    for node in nodes:
        mine = [bundle for bundle in bundles if found[bundle.process] is node]
        assert sum(b.num_cpus for b in mine) <= node.num_cpus
        assert sum(b.num_gpus for b in mine) <= node.num_gpus
    assert all(found[bundle.process].is_owner for bundle in bundles if bundle.is_pinned)


def test_a_share_and_servers_of_others_do_not_go_on_a_cluster():
    with pytest.raises(ValueError, match=r"deployment\.share is of one machine"):
        config(share="/tmp/share")
