"""Each deliberately broken environment is caught by the name of its rule; sound ones have no findings."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from mettle.errors import UserError
from mettle.quality.lint.linter import lint_environment, lint_source
from mettle.quality.lint.rules import RULES
from mettle.quality.rewards.reward_test import run_reward_test

HERE = Path(__file__).parent
BROKEN = sorted((HERE / "broken").glob("*.py"))


def load_file(path: Path):
    """The environment of one file, which is in no package."""
    spec = importlib.util.spec_from_file_location(f"quality_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.load_environment()


def lint(path: Path):
    env = load_file(path)
    return lint_environment(path, env, [run_reward_test(env)])


@pytest.mark.parametrize("path", BROKEN, ids=lambda path: path.stem)
def test_a_broken_environment_is_caught_by_the_name_of_its_rule(path):
    rule = path.stem.replace("_", "-")
    report = lint(path)
    found = {finding.rule.id: finding for finding in report.open_findings}
    assert rule in found, sorted(found)
    assert found[rule].file == path.name
    lines = path.read_text().splitlines()
    assert 1 <= found[rule].line <= len(lines)
    if found[rule].rule.how != "data":
        first = next(at for at, line in enumerate(lines, 1) if re.match(r"(async )?def (?!load_)", line))
        assert found[rule].line >= first, "a finding stands in the code that scores"
    status = "fail" if any(f.rule.severity == "error" for f in report.open_findings) else "warn"
    assert report.to_check().status == status


def test_there_is_a_broken_environment_for_every_rule():
    assert {path.stem.replace("_", "-") for path in BROKEN} == set(RULES)


def test_a_sound_environment_has_no_findings():
    path = HERE / "sound" / "products.py"
    report = lint(path)
    assert report.findings == []
    assert report.num_functions >= 4
    assert report.to_check().status == "pass"


def test_an_allow_comment_with_a_reason_suppresses_and_is_shown(tmp_path):
    text = (HERE / "broken" / "gold_substring.py").read_text()
    line = "    return 1.0 if answer in text else 0.0"
    (tmp_path / "env.py").write_text(
        text.replace(line, line + "  # mettle: allow[gold-substring] answers are sentences")
    )
    report = lint_source(tmp_path / "env.py")
    assert [finding.allowed for finding in report.findings] == ["answers are sentences"]
    assert report.open_findings == []
    assert report.to_check().status == "pass"


def test_an_allow_comment_above_the_function_holds_for_what_is_found_by_trying(tmp_path):
    text = (HERE / "broken" / "empty_output.py").read_text()
    (tmp_path / "env.py").write_text(
        text.replace("def correct", "# mettle: allow[empty-output] abstaining is fine\ndef correct")
    )
    report = lint(tmp_path / "env.py")
    assert {f.rule.id: f.allowed for f in report.findings}["empty-output"] == "abstaining is fine"
    assert "empty-output" not in {f.rule.id for f in report.open_findings}


def test_an_allow_comment_without_a_reason_or_of_another_rule_suppresses_nothing(tmp_path):
    text = (HERE / "broken" / "gold_substring.py").read_text()
    line = "    return 1.0 if answer in text else 0.0"
    for comment in ("# mettle: allow[gold-substring]", "# mettle: allow[any-match] because"):
        (tmp_path / "env.py").write_text(text.replace(line, f"{line}  {comment}"))
        assert len(lint_source(tmp_path / "env.py").open_findings) == 1


def test_a_file_that_is_not_python_is_the_users_mistake(tmp_path):
    (tmp_path / "env.py").write_text("def (:\n")
    with pytest.raises(UserError, match=r"env\.py is not Python"):
        lint_source(tmp_path)


@pytest.mark.parametrize(
    ("code", "rules"),
    [
        ("return float(answer.lower() in str(completion).lower())", {"gold-substring"}),
        ("return float(str(completion).endswith(answer))", {"gold-substring"}),
        ("return float(bool(re.search(re.escape(answer), str(completion))))", {"gold-substring"}),
        ("return float(answer in re.findall(r'[0-9]+', str(completion)))", {"any-match"}),
        ("return float(re.findall(r'[A-D]', str(completion))[0] == answer)", {"first-match"}),
        ("return float(re.findall(r'[A-D]', str(completion))[-1] == answer)", set()),
        ("return float(re.search(r'boxed.(\\d+)', str(completion)).group(1) == answer)", set()),
        ("return float(str(completion).strip() in ('yes', 'no'))", set()),
        ("return float(json.loads(str(completion)) == json.loads(answer))", set()),
        ("exec(str(completion))\n    return 1.0", {"unsandboxed-execution"}),
        ("os.system('python ' + str(completion))\n    return 1.0", {"unsandboxed-execution"}),
        ("return float(ast.literal_eval(str(completion)) == answer)", set()),
        ("try:\n        return float(completion)\n    except ValueError:\n        return 0.0", set()),
        ("try:\n        return float(completion)\n    except:\n        pass\n    return 0.0", {"swallowed-exception"}),
        ("try:\n        return float(completion)\n    except Exception as e:\n        raise ValueError from e", set()),
        ("with contextlib.suppress(Exception):\n        return 1.0\n    return 0.0", {"swallowed-exception"}),
        ("return requests.post(URL, json=answer).json()", {"network-no-timeout"}),
        ("return requests.post(URL, json=answer, timeout=5).json()", set()),
        ("SEEN.append(answer)\n    return 1.0", {"shared-state"}),
        ("SEEN = []\n    SEEN.append(answer)\n    return 1.0", set()),
        ("return random.Random(answer).random()", set()),
        ("return float(np.random.default_rng(0).random())", set()),
    ],
)  # fmt: skip
def test_one_line_decides(tmp_path, code, rules):
    (tmp_path / "env.py").write_text(f"SEEN = []\n\n\ndef reward(completion, answer):\n    {code}\n")
    assert {finding.rule.id for finding in lint_source(tmp_path / "env.py").findings} == rules


def test_a_helper_and_a_parser_function_are_read_with_what_they_are_given(tmp_path):
    (tmp_path / "env.py").write_text(
        "def first(text):\n    return re.search(r'\\d+', text).group()\n\n\n"
        "def holds(one, other):\n    return one in other\n\n\n"
        "def reward(completion, answer, parser):\n    return float(holds(answer, parser.parse_answer(completion)))\n\n\n"
        "def load_environment():\n    return vf.SingleTurnEnv(parser=vf.Parser(extract_fn=first))\n"
    )
    found = {(finding.rule.id, finding.line) for finding in lint_source(tmp_path).findings}
    assert found == {("first-match", 2), ("gold-substring", 6)}


def test_tools_that_run_what_the_model_writes_are_found(tmp_path):
    (tmp_path / "env.py").write_text(
        "def python(code: str) -> str:\n    return str(eval(code))\n\n\n"
        "def add(a: int, b: int) -> int:\n    return a + b\n\n\n"
        "def load_environment():\n    return vf.ToolEnv(tools=[python, add])\n"
    )
    assert [(f.rule.id, f.line) for f in lint_source(tmp_path).findings] == [("unsandboxed-execution", 2)]


def test_a_judge_prompt_without_marks_around_the_response_is_found_and_one_with_marks_is_not(tmp_path):
    code = "PROMPT = '''{prompt}'''\n\n\ndef load_environment():\n    return vf.JudgeRubric(judge_prompt=PROMPT)\n"
    for prompt, rules in (("Answer: {response}", ["judge-raw-output"]), ("<response>\n{response}\n</response>", [])):
        (tmp_path / "env.py").write_text(code.replace("{prompt}", prompt))
        assert [finding.rule.id for finding in lint_source(tmp_path).findings] == rules


def test_output_and_tests_in_one_folder_are_found_and_the_sandbox_is_not(tmp_path):
    writes = "    (folder / 'solution.py').write_text(str(completion))\n    (folder / 'test_it.py').write_text(tests)\n"
    (tmp_path / "env.py").write_text(
        f"def reward(completion, tests, folder):\n{writes}    done = subprocess.run(['pytest', str(folder)])\n"
        "    return float(done.returncode == 0)\n"
    )
    assert {f.rule.id for f in lint_source(tmp_path).findings} == {"tests-overwritable", "unsandboxed-execution"}
    (tmp_path / "env.py").write_text(
        "async def reward(completion, info, pool):\n"
        "    tests = [StdioTest(stdin=t['in'], expected=t['out']) for t in info['tests']]\n"
        "    return (await pool.judge(str(completion), tests)).fraction_passed\n"
    )
    assert lint_source(tmp_path).findings == []
