"""What a run needs of a cluster, and the one line with which a cluster without room is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.errors import UserError
from mettle.runs.cluster.placement import NodeBundle, NodeRoom, place, placement_of
from mettle.runs.config import RunConfig


def config(**deployment):
    ray = deployment.pop("ray", {})
    replicas = deployment.pop("replicas", 1)
    return RunConfig.model_validate(
        {
            "orchestrator": {"envs": [{"id": "reverse-text"}]},
            "inference": {"replicas": replicas},
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
