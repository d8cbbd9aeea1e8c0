"""The unit test of a reward: what it makes of sound, broken, slow, failing and untestable environments."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter

import pytest

import mettle.envs as vf
from mettle.errors import UserError
from mettle.quality.rewards.custom import read_custom_tests
from mettle.quality.rewards.golds import Gold, gold_values, labels_of, same, wrong_answers
from mettle.quality.rewards.layouts import layouts_for
from mettle.quality.rewards.reward_test import members_of, run_reward_test
from mettle.quality.settings import RewardTestOptions

from ..conftest import ROWS


def exact(completion, answer, parser):
    return float((parser.parse_answer(completion) or "").strip() == answer)


COUNTER = itertools.count()


def failed(report) -> list[str]:
    return [check.name for check in report.checks if check.status == "fail"]


DATES = [{"question": f"When, {n}?", "answer": f"2021-{n % 12 + 1:02d}-{n + 1:02d}"} for n in range(20)]


def words_f1(completion, answer, parser):
    given = re.findall(r"\w+", parser.parse_answer(completion) or "")
    wanted = re.findall(r"\w+", answer)
    shared = sum((Counter(given) & Counter(wanted)).values())
    return 2 * shared / (len(given) + len(wanted)) if shared else 0.0


def answer_format(completion, parser):
    return float(bool(parser.parse_answer(completion)))


def test_a_wrong_day_that_passes_is_a_failed_check_and_its_margin_is_not_enough_to_excuse_it(single):
    env = single(words_f1, answer_format, weights=[1.0, 0.1], rows=DATES, parser=vf.XMLParser(["answer"]))
    report = run_reward_test(env)
    assert failed(report) == ["nothing wrong passes"]
    detail = next(check.detail for check in report.checks if check.name == "nothing wrong passes")
    assert "other-day passes on 8 of 8 rows (words_f1 0.667 on row 0, 0.5 passes)" in detail
    env.pass_threshold = 0.9
    assert failed(run_reward_test(env)) == [], "part of the reward for part of the answer is no fault by itself"


def test_the_pass_threshold_is_of_the_correctness_and_not_of_the_sum_with_the_form(single):
    def part(completion, answer, parser):
        return 1.0 if exact(completion, answer, parser) else 0.45

    env = single(part, answer_format, weights=[1.0, 0.2], parser=vf.XMLParser(["answer"]))
    assert failed(run_reward_test(env)) == []
    rated = single(
        part, answer_format, weights=[1.0, 0.2], parser=vf.XMLParser(["answer"]), pass_on=["part", "answer_format"]
    )
    assert "nothing wrong passes" in failed(run_reward_test(rated))


def test_gold_is_above_wrong_by_a_margin(single):
    def barely(completion, answer, parser):
        given = (parser.parse_answer(completion) or "").strip()
        return 1.0 if given == answer else 0.95 if given.isdigit() else 0.0

    report = run_reward_test(single(barely, pass_threshold=1.0))
    assert failed(report) == ["gold above wrong"]
    detail = next(check.detail for check in report.checks if check.name == "gold above wrong")
    assert "other-row earns nearly as much as gold on 8 of 8 rows (0.95 against 1 on row 0)" in detail


def test_a_threshold_that_no_right_answer_reaches_is_said(single):
    report = run_reward_test(single(lambda completion, answer, parser: 0.3 * exact(completion, answer, parser)))
    assert [(c.name, c.status) for c in report.checks if c.status != "pass"] == [("right answers pass", "warn")]


@pytest.mark.parametrize(
    ("rows", "reward", "kind"),
    [
        ([{"question": f"Sort {n}, {n + 1}.", "answer": f"{n}, {n + 1}"} for n in range(20)],
         lambda completion, answer, parser: float(sorted((parser.parse_answer(completion) or "").split(", ")) == sorted(answer.split(", "))),
         "swapped-order"),
        ([{"question": f"Symbol {n}?", "answer": "Aa"[n % 2] + "bcdefghij"[n // 2]} for n in range(18)],
         lambda completion, answer, parser: float((parser.parse_answer(completion) or "").lower() == answer.lower()),
         "other-case"),
        ([{"question": f"Which release, {n}?", "answer": f"{n}.1.{n}"} for n in range(20)],
         lambda completion, answer, parser: float((parser.parse_answer(completion) or "")[:4] == answer[:4]),
         "off-by-one"),
    ],
)  # fmt: skip
def test_near_misses_that_earn_as_much_as_gold_are_found(single, rows, reward, kind):
    report = run_reward_test(single(reward, rows=rows))
    assert {"gold above wrong", "nothing wrong passes"} <= set(failed(report))
    assert any(kind in check.detail for check in report.checks if check.status == "fail")


def test_a_sound_reward_passes_and_every_kind_is_tried(single):
    report = run_reward_test(single(exact))
    assert (report.status, report.source, report.layout, report.num_rows) == ("pass", "data", "plain", 8)
    rewards = {row["kind"]: (row["family"], row["mean"]) for row in report.table()}
    assert rewards["gold"] == ("gold", 1.0)
    wrong = {
        "other-row",
        "near-miss",
        "empty",
        "whitespace",
        "refusal",
        "prompt-echo",
        "nonsense",
        "malformed",
        "very-long",
    }
    assert wrong <= set(rewards)
    assert {rewards[kind][1] for kind in wrong} == {0.0}
    assert json.loads(json.dumps(report.to_dict()))["kinds"][0]["kind"] == "gold"


@pytest.mark.parametrize(
    ("extract", "prompt", "layout"),
    [
        (lambda text: vf.extract_boxed_answer(text, strict=True), None, "boxed"),
        (lambda text: text.rpartition("####")[2].strip() if "####" in text else "", None, "hash"),
        (lambda text: (re.findall(r"<answer>(.*?)</answer>", text) or [""])[-1], None, "answer-tag"),
        (lambda text: text.splitlines()[-1].removeprefix("Answer: ") if "Answer:" in text else "", None, "answer-line"),
        (lambda text: str(json.loads(text)["answer"]) if text.startswith("{") else "", None, "json"),
        (lambda text: text.splitlines()[-1] if "\n" in text.strip() else "", None, "last-line"),
        (lambda text: text.strip(), "Give the number in \\boxed{}.", "plain"),
    ],
)  # fmt: skip
def test_the_format_that_the_reward_reads_is_found_by_trying(single, extract, prompt, layout):
    report = run_reward_test(single(exact, parser=vf.Parser(extract_fn=extract), system_prompt=prompt))
    assert report.layout == layout
    assert report.status == ("warn" if prompt else "pass")
    assert ("format asked for is read" in {check.name for check in report.checks}) is bool(prompt)


def test_xml_fields_and_thinking_are_written_as_their_parsers_read_them(single):
    xml = vf.XMLParser(["reasoning", ("code", "answer")], answer_field="code")
    assert run_reward_test(single(exact, parser=xml)).layout == "xml"
    assert run_reward_test(single(exact, parser=vf.ThinkParser())).status == "pass"


def test_gold_is_read_out_of_worked_answers_and_of_info(single):
    rows = [{"question": f"{n} + 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in range(20)]
    report = run_reward_test(
        single(lambda completion, answer, parser: exact(completion, answer.split("#### ")[1], parser), rows=rows)
    )
    assert report.status == "pass"
    rows = [{"question": f"{n} + 1?", "info": {"solution": n + 1}} for n in range(20)]
    report = run_reward_test(
        single(lambda completion, info, parser: exact(completion, str(info["solution"]), parser), rows=rows)
    )
    assert report.status == "pass"


@pytest.mark.parametrize(
    ("reward", "check"),
    [
        (lambda completion: 1.0, "not all equal"),
        (lambda completion, answer, parser: float(answer in parser.parse_answer(completion)) or 1.0, "gold above wrong"),
        (lambda completion, answer, parser: 1.0 - exact(completion, answer, parser), "gold above wrong"),
        (lambda completion, answer, parser: exact(completion, answer, parser) or float(not parser.parse_answer(completion)), "gold above nothing"),
        (lambda completion, answer, parser: int(parser.parse_answer(completion)) == int(answer), "no errors"),
        (lambda completion, answer, parser: exact(completion, answer, parser) or float("nan"), "no errors"),
        (lambda completion, answer, parser: 5.0 * exact(completion, answer, parser), "in range"),
        (lambda completion, answer, parser: exact(completion, answer, parser) + next(COUNTER) * 1e-6, "deterministic"),
    ],
)  # fmt: skip
def test_what_a_reward_must_obey_is_checked(single, reward, check):
    assert check in failed(run_reward_test(single(reward)))


def test_a_reward_that_never_ends_is_stopped_even_where_it_swallows_exceptions(single):
    def hangs(completion, answer, parser):
        given = (parser.parse_answer(completion) or "").strip()
        while given == "":
            try:
                re.match(r"(a+)+$", "a" * 60 + "b")
            except Exception:
                continue
        return float(given == answer)

    report = run_reward_test(single(hangs), RewardTestOptions(num_rows=1, timeout_s=0.2))
    assert "in time" in failed(report)


def test_a_range_that_is_stated_is_the_range(single):
    env = single(lambda completion, answer, parser: 5.0 * exact(completion, answer, parser))
    assert run_reward_test(env, RewardTestOptions(reward_range=(0.0, 5.0))).status == "pass"


def test_a_group_reward_is_tried_in_groups(single):
    def best(completions, answers, parser) -> list[float]:
        right = [exact(c, a, parser) for c, a in zip(completions, answers, strict=True)]
        return [r / max(1.0, sum(right)) for r in right]

    report = run_reward_test(single(best, parser=vf.Parser(extract_fn=lambda text: text.split("\n")[-1])))
    assert report.status == "pass"
    assert max(row["mean"] for row in report.table()) < 1.0, "the right answers of a group share its reward"


class Relay(vf.MultiTurnEnv):
    """Wants `a`, then `b`."""

    async def env_response(self, messages, state, **kwargs):
        return [vf.UserMessage(content="and then?")]


def ab(completion):
    said = [message["content"] for message in completion if message["role"] == "assistant"]
    return float(said == ["a", "b"])


def test_an_environment_of_several_turns_without_demonstrations_is_untested_and_never_green():
    env = Relay(dataset=[{"question": "go", "answer": "a"}] * 3, rubric=vf.Rubric(funcs=[ab]), max_turns=2)
    report = run_reward_test(env)
    assert report.status in ("untested", "fail")
    first = report.checks[0]
    assert (first.name, first.status) == ("gold above wrong", "untested")
    assert "demonstrate" in first.fix


def test_demonstrations_of_turns_and_of_tools_are_played():
    env = Relay(
        dataset=[{"question": "go"}] * 3, rubric=vf.Rubric(funcs=[ab]), max_turns=2,
        demonstrate=lambda messages, row: "ab"[len(messages) // 2],
    )  # fmt: skip
    report = run_reward_test(env)
    assert (report.status, report.source) == ("untested", "demonstrations"), "no wrong answer could be made"
    assert {c.name for c in report.checks if c.status == "untested"} == {"gold above wrong"}
    shown = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    other = [{"role": "assistant", "content": "b"}, {"role": "assistant", "content": "a"}]
    rows = [{"question": "go", "demonstration": shown}, {"question": "no", "demonstration": other}]
    report = run_reward_test(Relay(dataset=rows, rubric=vf.Rubric(funcs=[ab]), max_turns=2))
    assert [check.status for check in report.checks if check.name == "gold above wrong"] == ["fail"]


def test_an_environment_that_goes_on_for_ever_is_told_so():
    async def respond(self, messages, state, **kwargs):
        if messages[-1]["content"] == state["answer"]:
            state["final_env_response"] = [vf.UserMessage(content="yes")]
        return [vf.UserMessage(content="no")]

    endless = type("Endless", (vf.MultiTurnEnv,), {"env_response": respond})
    rows = [{"question": "the number?", "answer": str(n)} for n in range(5)]
    found = lambda state, completion: float(state.get("final_env_response") is not None)  # noqa: E731
    report = run_reward_test(endless(dataset=rows, rubric=vf.Rubric(funcs=[found])))
    statuses = {check.name: check.status for check in report.checks}
    assert (statuses["ends"], statuses["no errors"]) == ("warn", "pass")
    assert statuses["gold above wrong"] == "untested", "no wrong answer has a reward to compare with"
    assert next(row for row in report.table() if row["kind"] == "other-row")["errors"] == 5


def test_rows_that_cannot_be_read_are_a_failed_check(single):
    def rows():
        raise ConnectionError("no network")

    report = run_reward_test(single(exact, rows=rows))
    assert [(check.name, check.status) for check in report.checks] == [("rows", "fail")]
    assert "ConnectionError: no network" in report.checks[0].detail


def test_rows_without_a_right_answer_are_said_so(single):
    report = run_reward_test(single(lambda completion: 0.5, rows=[{"question": "write a poem"}] * 3))
    assert (report.status, report.source) == ("untested", "nothing")
    assert report.tried == []


def test_members_of_a_group_are_tested_one_by_one(single):
    group = vf.EnvGroup([single(exact), single(exact, parser=vf.XMLParser(["answer"]))], env_names=["one", "two"])
    reports = [run_reward_test(member) for member in members_of(group)]
    assert [report.layout for report in reports] == ["plain", "xml"]
    assert {report.status for report in reports} == {"pass"}


def test_a_preset_insists_on_its_format(single):
    env = single(exact, parser=vf.Parser(extract_fn=lambda text: vf.extract_boxed_answer(text, strict=True)))
    assert run_reward_test(env, RewardTestOptions(preset="math")).status == "pass"
    assert "gold above wrong" in failed(run_reward_test(env, RewardTestOptions(preset="gsm8k")))
    with pytest.raises(ValueError, match="there is no preset 'maths'; there are gsm8k, math,"):
        RewardTestOptions(preset="maths")
    with pytest.raises(UserError, match="needs an XML parser"):
        run_reward_test(env, RewardTestOptions(preset="xml"))


def test_custom_tests_are_run_with_their_bounds(single, tmp_path):
    env = single(exact)
    question, answer = ROWS[3]["question"], ROWS[3]["answer"]
    tests = [
        {"name": "right", "question": question, "completion": answer, "expected": 1.0},
        {"name": "wrong", "example_id": 3, "completion": {"role": "assistant", "content": "1"}, "max": 0.1},
        {"name": "too much", "example_id": 3, "completion": [answer], "max": 0.5},
    ]
    path = tmp_path / "tests.json"
    path.write_text(json.dumps(tests))
    report = run_reward_test(env, custom=read_custom_tests(path, env))
    found = {check.name: check.status for check in report.checks if check.name.startswith("custom")}
    assert found == {"custom: right": "pass", "custom: wrong": "pass", "custom: too much": "fail"}


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("[", "cannot be read"),
        ("{}", "is to be a list of tests"),
        ('[{"completion": "x", "min": 0, "example_id": 99}]', "names example_id 99, which no row"),
        ('[{"completion": "x", "example_id": 0}]', "says nothing about the reward"),
        ('[{"example_id": 0, "min": 1}]', "has no `completion`"),
        ('[{"example_id": 0, "min": 1, "completion": "x", "maximum": 2}]', "unknown key 'maximum'"),
    ],
)
def test_custom_tests_that_cannot_be_run_are_refused(single, tmp_path, tests, message):
    path = tmp_path / "tests.json"
    path.write_text(tests)
    with pytest.raises(UserError, match=re.escape(message)):
        read_custom_tests(path, single(exact))


def test_wrong_answers_are_wrong_by_more_than_writing():
    assert same("1,000", "1000.0")
    assert same("Paris.", "paris")
    assert not same("1/2", "1/3")
    number = wrong_answers(Gold("-42", ("42", "7"), ()))
    assert number == {"other-row": "42", "near-miss": "-41", "negation": "42"}
    assert "negation" not in wrong_answers(Gold("1834", ("1900",), ())), "no answer has a sign"
    label = wrong_answers(Gold("Yes", ("No",), ("Yes", "No")))
    assert label == {"other-row": "No", "negation": "No", "other-choice": "No"}
    assert wrong_answers(Gold("B", (), ()))["other-choice"] == "C"
    assert json.loads(wrong_answers(Gold('{"a": 1}', (), ()))["near-miss"]) == {"a": 2}
    assert wrong_answers(Gold("x = 1\nprint(x)", (), ()))["near-miss"] == "x = 1"


def test_labels_are_few_answers_that_come_again():
    assert labels_of(["a", "b"] * 10) == ("a", "b")
    assert labels_of([str(n) for n in range(30)]) == ()
    assert labels_of(["a"] * 30) == ()


def test_what_a_row_may_mean_by_its_answer():
    assert gold_values({"answer": "2 + 2\n#### 4"}) == ["4", "2 + 2\n#### 4"]
    assert gold_values({"answer": "", "info": '{"solution": [7, 8]}'}) == ["7"]
    assert gold_values({"question": "x"}) == []


def test_layouts_that_the_prompt_asks_for_come_first():
    rows = [{"prompt": [{"role": "system", "content": "Put it in \\boxed{}."}]}]
    assert [layout.name for layout in layouts_for(vf.Parser(), rows)][:2] == ["boxed", "plain"]
