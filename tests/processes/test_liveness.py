"""Who stands still: cases of the wait graph, as a table of beats and the one process that is to be blamed."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.processes.beats import Beat, Questions, Wait
from mettle.processes.liveness import SILENT_RESTART_S, WRITING_RESTART_S, Looks, diagnose, root_of, worker_name
from mettle.storage.database import BUSY_TIMEOUT_S

NOW = 1000.0
PIDS = {"supervisor": 1, "orchestrator": 2, "trainer": 3, "inference": 4, "hub": 5, "sft": 6}
WORKER = worker_name("owner/words@1", 77)
JUDGE = "judge j at http://far/v1"


def beat(name, **fields):
    return Beat(**{"name": name, "pid": PIDS.get(name, 77), "at": NOW - 0.3, **fields})


def wait(owner, target, waited_s, *, edge="", budget_s=1800.0):
    edges = {"environments": "rollouts", "trainer": "weights", "orchestrator": "batch"}
    return (Wait(owner, edge or edges.get(target, target), target, "something", NOW - waited_s, budget_s),)


def asked(silent_s, num_open=3, **fields):
    return (Questions(JUDGE, num_open, float(silent_s), **fields),)


def healthy(**changes):
    """A run in which the engine samples, the orchestrator waits for rollouts and the trainer for a batch."""
    beats = {
        "supervisor": beat("supervisor"),
        "orchestrator": beat(
            "orchestrator", has_work=True, idle_s=4.0, longest_idle_s=6.0, waits=wait("orchestrator", "environments", 9)
        ),
        "trainer": beat("trainer", waits=wait("trainer", "orchestrator", 9)),
        "inference": beat("inference", has_work=True, idle_s=0.1, still_s=0.1),
    }
    return {**beats, **{name: replace(beats.get(name, beat(name)), **fields) for name, fields in changes.items()}}


ROLLING = {"has_work": True, "idle_s": 40.0, "longest_idle_s": 2.0}
IDLE_ENGINE = {"has_work": False, "idle_s": 0.0, "still_s": 40.0}

CASES = {
    "nothing is wrong": (healthy(), None, ""),
    "the trainer is frozen while the others wait for it": (
        healthy(trainer={"at": NOW - 12, "waits": ()}, orchestrator={"waits": wait("orchestrator", "trainer", 11)}),
        "trainer", "no sign of life for 12 s",
    ),
    "a rank is frozen, and the others have work that they cannot do": (
        healthy(**{
            "trainer-1": {"at": NOW - 25}, "trainer": {"has_work": True, "idle_s": 24.0, "waits": ()},
            "orchestrator": {"idle_s": 24.0, "longest_idle_s": 2.0, "waits": wait("orchestrator", "trainer", 22)},
            "inference": IDLE_ENGINE,
        }), "trainer-1", "no sign of life for 25 s",
    ),
    "a frozen trainer that says that it waits is still frozen": (
        healthy(trainer={"at": NOW - 12}), "trainer", "no sign of life",
    ),
    "the engine is frozen, whoever waits": (healthy(inference={"at": NOW - 15}), "inference", "no sign of life"),
    "the orchestrator is frozen": (healthy(orchestrator={"at": NOW - 15}), "orchestrator", "no sign of life"),
    "the supervisor is frozen": (healthy(supervisor={"at": NOW - 15}), "supervisor", "no sign of life"),
    "the page is frozen": (healthy(hub={"at": NOW - 15}), "hub", "no sign of life"),
    "a worker is frozen": (healthy(**{WORKER: {"at": NOW - 15}}), WORKER, "no sign of life"),
    "the engine was paused by somebody": (healthy(inference={"paused_s": 11.0}), "inference", "was told to pause"),
    "a pause for an update is none": (healthy(inference={"paused_s": 3.0}), None, ""),
    "an environment blocks the orchestrator's loop": (
        healthy(orchestrator={"late_s": 11.0, "where": "words/words.py:8 in reward"}, inference=IDLE_ENGINE),
        "orchestrator", "its main loop is blocked for 11 s in words/words.py:8 in reward",
    ),
    "the engine's server has its loop blocked": (healthy(inference={"late_s": 11.0}), "inference", "main loop"),
    "an environment blocks a worker's loop": (
        healthy(**{WORKER: {"late_s": 11.0, **ROLLING}}, inference=IDLE_ENGINE), WORKER, "main loop is blocked",
    ),
    "an environment in a worker waits for something that never comes": (
        healthy(**{WORKER: ROLLING}, inference=IDLE_ENGINE, orchestrator={**ROLLING}), WORKER, "no steps for 40 s",
    ),
    "an environment in the orchestrator waits for something that never comes": (
        healthy(inference=IDLE_ENGINE, orchestrator={**ROLLING}), "orchestrator", "no steps for 40 s",
    ),
    "long answers of the model are nobody's fault": (
        healthy(**{WORKER: ROLLING}, orchestrator={**ROLLING}), None, "",
    ),
    "the engine has requests and does not step": (
        healthy(**{WORKER: ROLLING}, orchestrator={**ROLLING},
                inference={"has_work": True, "idle_s": 25.0, "still_s": 25.0, "longest_idle_s": 1.0}),
        "inference", "no steps for 25 s",
    ),
    "the trainer is in a step that does not end": (
        healthy(trainer={"waits": (), "has_work": True, "idle_s": 30.0, "longest_idle_s": 2.0, "where": "loss.py:3 in f"}),
        "trainer", "has work and has finished no steps for 30 s in loss.py:3 in f",
    ),
    "a step that takes as long as steps take": (
        healthy(trainer={"waits": (), "has_work": True, "idle_s": 90.0, "longest_idle_s": 80.0}), None, "",
    ),
    "a step that takes six times as long": (
        healthy(trainer={"waits": (), "has_work": True, "idle_s": 500.0, "longest_idle_s": 80.0}), "trainer", "500 s",
    ),
    "an engine that is not there is awaited for long": (
        {name: b for name, b in healthy(orchestrator={"waits": wait("orchestrator/updater", "inference", 200, budget_s=600)},
         ).items() if name != "inference"}, "inference", "orchestrator/updater has waited 200 s of 600 s for inference",
    ),
    "everybody waits for a step that moves": (
        healthy(trainer={"waits": (), "has_work": True, "idle_s": 1.0, "longest_idle_s": 2.0},
                orchestrator={"waits": wait("orchestrator", "trainer", 900), "has_work": False}), None, "",
    ),
    "a sandbox service is frozen, and rollouts wait for it": (
        healthy(**{WORKER: ROLLING, "sandboxes-0": {"at": NOW - 15}, "sandboxes-1": {}},
                orchestrator={**ROLLING}, inference=IDLE_ENGINE),
        "sandboxes-0", "no sign of life for 15 s",
    ),
    "an engine of a cluster is frozen, and the one in front of it has nothing left to do": (
        healthy(**{WORKER: ROLLING, "replica-0": {"at": NOW - 15}, "replica-1": {}},
                orchestrator={**ROLLING}, inference=IDLE_ENGINE),
        "replica-0", "no sign of life for 15 s",
    ),
    "a worker froze after its last beat had said that it has no work, and was given some": (
        healthy(**{WORKER: {"at": NOW - 25}}, orchestrator={**ROLLING}, inference=IDLE_ENGINE),
        WORKER, "no sign of life for 25 s",
    ),
    "two wait for each other": (
        healthy(orchestrator={"waits": wait("orchestrator", "trainer", 600), "has_work": False},
                trainer={"waits": wait("trainer", "orchestrator", 500, budget_s=600)}, inference=IDLE_ENGINE),
        "trainer", "trainer -> orchestrator",
    ),
    "a judge answers nobody, and the worker that asks it has work": (
        healthy(**{
            WORKER: {**ROLLING, "asked": asked(25, longest_s=4.0)}, "inference": IDLE_ENGINE,
            "orchestrator": {"idle_s": 25.0, "longest_idle_s": 2.0, "waits": wait("orchestrator", "environments", 25)},
        }), JUDGE, "judge j at http://far/v1 has not answered for 25 s; 3 questions of worker-owner-words-1-77 wait",
    ),
    "a judge takes as long as it has taken before": (
        healthy(**{WORKER: {**ROLLING, "asked": asked(45, longest_s=9.1)}, "inference": IDLE_ENGINE}), None, "",
    ),
    "a judge has just been asked by one, and has been silent to another": (
        healthy(**{WORKER: {**ROLLING, "asked": asked(25)}, "worker-b-2": {**ROLLING, "asked": asked(1)},
                   "inference": IDLE_ENGINE}), JUDGE, "has not answered for 25 s; 6 questions",
    ),
    "a judge answers one worker and not another": (
        healthy(**{WORKER: {**ROLLING, "asked": asked(25)}, "worker-b-2": {"asked": asked(0, 0, answered_s=3.0)},
                   "inference": IDLE_ENGINE}), None, "",
    ),
    "a judge was silent, and nobody asks it now": (healthy(**{WORKER: {"asked": asked(25, 0)}}), None, ""),
    "who asks a judge does not run": (
        healthy(**{WORKER: {**ROLLING, "asked": asked(40), "at": NOW - 40}, "inference": IDLE_ENGINE}),
        WORKER, "no sign of life",
    ),
    "the trainer has waited long for a judge that the orchestrator asks": (
        healthy(orchestrator={"has_work": True, "idle_s": 0.0, "asked": asked(8)}, inference=IDLE_ENGINE,
                trainer={"waits": wait("trainer", "orchestrator", 400, budget_s=600.0)}), None, "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_right_process_is_blamed(name):
    beats, blamed, text = CASES[name]
    faults = diagnose(beats, NOW)
    assert {fault.process for fault in faults[:1]} == ({blamed} if blamed else set()), faults
    if faults:
        assert text in faults[0].text


@pytest.mark.parametrize(
    "name", [name for name, (_, blamed, _) in CASES.items() if blamed and "waits for each" not in name]
)
def test_nobody_else_is_blamed(name):
    beats, blamed, _ = CASES[name]
    assert {fault.process for fault in diagnose(beats, NOW)} == {blamed}


def test_what_the_kernel_says_tells_a_stopped_process_from_a_slow_host_and_a_debugger():
    beats = healthy(trainer={"at": NOW - 31})
    for letter, text, is_due in (("T", "stopped by a signal", True), ("t", "debugger", False), ("R", "threads", False)):
        (fault,) = diagnose(beats, NOW, state_of=lambda pid, letter=letter: letter)
        assert (text in fault.text, fault.is_due) == (True, is_due)
    (late,) = diagnose(healthy(trainer={"at": NOW - 121}), NOW, state_of=lambda pid: "D")
    assert late.is_due


def test_who_is_blocked_in_the_middle_of_a_transaction_is_ended_before_the_others_give_up_waiting_for_it():
    stuck = {"has_work": True, "idle_s": 90.0, "longest_idle_s": 2.0, "waits": ()}
    for is_writing, is_due in ((False, False), (True, True)):
        blocked = {"late_s": 61.0, "is_writing": is_writing}
        faults = diagnose(healthy(orchestrator=blocked, trainer=stuck), NOW)
        assert [(f.process, f.is_due) for f in faults if f.process == "orchestrator"] == [("orchestrator", is_due)]
        assert ("trainer" in {fault.process for fault in faults}) is not is_writing  # it waits to write
    assert WRITING_RESTART_S < SILENT_RESTART_S < BUSY_TIMEOUT_S


def test_a_worker_on_another_node_that_is_silent_is_told_and_left_to_its_pool():
    for host, is_due in (("", True), ("far/1", False)):
        (fault,) = diagnose(healthy(**{WORKER: {"at": NOW - 121, "host": host}}), NOW, state_of=lambda pid: "R")
        assert (fault.process, fault.is_due) == (WORKER, is_due)


def test_without_a_place_for_workers_nobody_who_rolls_out_stands_still():
    still = healthy(orchestrator={"idle_s": 60.0, "longest_idle_s": 2.0, "waits": ()}, inference=IDLE_ENGINE)
    places = {name: beat(name) for name in ("workers-0", "workers-1")}
    assert diagnose(still, NOW, missing={"workers-0", "workers-1"}) == []
    (fault,) = diagnose({**still, "workers-1": places["workers-1"]}, NOW, missing={"workers-0"})
    assert fault.process == "orchestrator"
    assert [one.process for one in diagnose({**still, **places}, NOW)] == ["orchestrator"]


def test_without_a_sandbox_service_nobody_who_rolls_out_stands_still():
    still = healthy(**{WORKER: ROLLING}, orchestrator={**ROLLING}, inference=IDLE_ENGINE)
    services = {name: beat(name) for name in ("sandboxes-0", "sandboxes-1")}
    assert diagnose(still, NOW, missing={"sandboxes-0", "sandboxes-1"}) == []
    for beats, missing in (({"sandboxes-1": services["sandboxes-1"]}, {"sandboxes-0"}), (services, set())):
        assert [one.process for one in diagnose({**still, **beats}, NOW, missing=missing)] == [WORKER]


def test_who_stands_in_front_of_a_clusters_engines_is_not_blamed_while_there_are_none():
    waits = {"waits": wait("orchestrator/updater", "inference", 200, budget_s=600)}
    beats = healthy(orchestrator=waits, inference={**IDLE_ENGINE, "waits": ()})
    assert diagnose(beats, NOW, missing={"replica-0", "replica-1"}) == []
    for there, missing in (({"replica-1": beat("replica-1")}, {"replica-0"}), ({}, set())):
        (fault,) = diagnose({**beats, **there}, NOW, missing=missing)
        assert (fault.process, fault.kind) == ("inference", "awaited")


def test_with_a_blocked_engine_an_orchestrator_whose_rollouts_are_over_is_not_blamed():
    """It asks the engine for an update, which is no wait of its main loop."""
    beats = healthy(
        inference={"has_work": False, "late_s": 30.0, "still_s": 30.0},
        orchestrator={"idle_s": 30.0, "longest_idle_s": 1.0, "waits": wait("orchestrator", "trainer", 30)},
    )
    assert [fault.process for fault in diagnose(beats, NOW)] == ["inference"]


TOLD_AND_DUE = {
    "silent": ("trainer", lambda s: {"at": NOW - s}, 10, 120),
    "blocked": ("orchestrator", lambda s: {"late_s": s}, 10, 300),
    "a worker that is blocked, which its pool ends": (WORKER, lambda s: {"late_s": s}, 10, None),
    "paused": ("inference", lambda s: {"paused_s": s}, 10, 60),
    "stuck, of short steps": (
        "trainer", lambda s: {"waits": (), "has_work": True, "idle_s": s, "longest_idle_s": 0.5}, 20, 300,
    ),
    "stuck, of long steps": (
        "trainer", lambda s: {"waits": (), "has_work": True, "idle_s": s, "longest_idle_s": 80.0}, 400, 1600,
    ),
    "stuck in what may be its first step": (
        "trainer", lambda s: {"waits": (), "has_work": True, "idle_s": s, "longest_idle_s": 0.0}, 20, None,
    ),
    "a worker that is stuck": (
        WORKER, lambda s: {"has_work": True, "idle_s": s, "longest_idle_s": 2.0}, 20, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TOLD_AND_DUE)
def test_each_fault_is_told_and_due_at_its_time_and_not_before(name):
    process, fields, told_s, due_s = TOLD_AND_DUE[name]

    def fault_at(seconds):
        beats = healthy(inference=IDLE_ENGINE | {"still_s": 1e6}) if process == WORKER else healthy()
        beats[process] = replace(beats.get(process, beat(process)), **fields(seconds))
        return next((fault for fault in diagnose(beats, NOW) if fault.process == process), None)

    assert fault_at(told_s - 0.25) is None
    assert fault_at(told_s) is not None
    assert fault_at(told_s).restart_at_s == due_s
    assert [fault_at(seconds).is_due for seconds in ((due_s or 1e5) - 0.25, due_s or 1e5)] == [False, due_s is not None]


def test_a_wait_is_told_after_a_quarter_of_its_budget_and_its_end_is_due_after_half():
    def fault_at(waited_s):
        beats = healthy(orchestrator={"waits": wait("orchestrator", "inference", waited_s, budget_s=600)})
        return next(iter(diagnose({name: b for name, b in beats.items() if name != "inference"}, NOW)), None)

    assert fault_at(149.75) is None
    fault = fault_at(150)
    assert (fault.process, fault.pid, fault.age_s, fault.restart_at_s) == ("inference", 0, 150, 300)
    assert [fault_at(seconds).is_due for seconds in (299.75, 300)] == [False, True]


def test_of_several_that_wait_for_one_the_longest_is_told():
    waits = [wait(f"orchestrator/{i}", "inference", seconds, budget_s=600) for i, seconds in enumerate((200, 260, 230))]
    beats = healthy(orchestrator={"waits": tuple(one for (one,) in waits)})
    (fault,) = diagnose({name: b for name, b in beats.items() if name != "inference"}, NOW)
    assert (fault.age_s, fault.text.startswith("orchestrator/1 has waited 260 s")) == (260, True)


def test_who_has_stood_still_longest_is_told_first():
    found = diagnose(healthy(trainer={"at": NOW - 15}, hub={"at": NOW - 40}, inference={"at": NOW - 20}), NOW)
    assert [fault.process for fault in found] == ["hub", "inference", "trainer"]


def test_a_worker_without_work_holds_nobody_up():
    idle = {"has_work": False, "idle_s": 0.0}
    found = diagnose(healthy(**{WORKER: idle}, inference=IDLE_ENGINE, orchestrator={**ROLLING}), NOW)
    assert [fault.process for fault in found] == ["orchestrator"]


def test_a_silence_counts_only_as_long_as_somebody_looked():
    beats = healthy(trainer={"at": NOW - 3600}, inference={"at": NOW - 3600})
    assert diagnose(beats, NOW, looked_s=lambda since: min(2.0, NOW - since)) == []
    assert {fault.age_s for fault in diagnose(beats, NOW, looked_s=lambda since: min(11.0, NOW - since))} == {11.0}


def test_gaps_between_looks_are_taken_off_and_what_was_seen_before_them_stays():
    looks = Looks()
    assert looks.seconds_since(0.0) == 0.0
    for now in (100.0, 101.0, 104.0, 111.0, 112.0, 3600.0, 3601.0):
        looks.look(now)
    assert looks.seconds_since(0.0) == 4 + 1 + 1
    assert looks.seconds_since(102.0) == 2 + 1 + 1
    assert looks.seconds_since(108.0) == 1 + 1
    assert looks.seconds_since(3600.5) == 0.5
    assert looks.seconds_since(3700.0) == 0.0


def test_the_chain_of_waits_is_followed_to_its_root():
    beats = healthy()
    (first,) = beats["trainer"].waits
    assert root_of(beats, first) == ("orchestrator", "inference")
    beats = healthy(**{WORKER: ROLLING}, inference=IDLE_ENGINE)
    assert root_of(beats, first) == ("orchestrator", WORKER)


names = st.sampled_from(["orchestrator", "trainer", "inference", "environments", "nobody"])
beats = st.builds(
    lambda name, late, paused, idle, work, target, waited, silent: replace(
        beat(name), at=NOW - silent, late_s=late, paused_s=paused, idle_s=idle, has_work=work,
        waits=wait(name, target, waited) if target != "nobody" else (),
    ),
    names.filter(lambda n: n not in ("environments", "nobody")), *[st.floats(0, 60)] * 3, st.booleans(), names,
    st.floats(0, 1800), st.floats(0, 60),
)  # fmt: skip


@given(st.lists(beats, max_size=3))
def test_every_graph_has_an_answer_and_whoever_moves_is_not_in_it(found):
    graph = {b.name: b for b in found}
    for fault in diagnose(graph, NOW):
        b = graph.get(fault.process)
        assert fault.text
        assert fault.age_s >= 10
        if b is not None and b.has_work and not b.waits:
            assert max(NOW - b.at, b.late_s, b.paused_s, b.idle_s) >= 10
    for b in found:
        for each in b.waits:
            assert len(set(root_of(graph, each))) == len(root_of(graph, each)) >= 1
