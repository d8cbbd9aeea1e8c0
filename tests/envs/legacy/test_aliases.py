"""`import verifiers`: every historical path, lazily, and an honest refusal where nothing is offered."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[3] / "src"


def in_fresh_process(code: str) -> str:
    """What a new interpreter prints, with the alias installed."""
    prelude = "from mettle.envs.legacy.aliases import install_verifiers_alias\ninstall_verifiers_alias()\n"
    done = subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_all_forms_of_import_lead_to_the_same_class():
    said = in_fresh_process(
        """
        import verifiers as vf
        import verifiers.envs.tool_env as module
        import verifiers.parsers.xml_parser
        from verifiers.envs.tool_env import ToolEnv
        from verifiers.legacy.envs.tool_env import ToolEnv as Legacy
        from verifiers import ToolEnv as Root, types
        from verifiers.types import Messages, State, ChatCompletionMessageToolCall
        import mettle.envs
        assert ToolEnv is module.ToolEnv is Legacy is Root is vf.ToolEnv is mettle.envs.ToolEnv
        assert verifiers.parsers.xml_parser.XMLParser is vf.XMLParser is vf.parsers.XMLParser
        assert types.State is State is vf.State
        print(vf.__version__)
        """
    )
    assert said == "0.3.0"


def test_the_alias_imports_nothing_before_it_is_used():
    said = in_fresh_process(
        """
        import verifiers, sys
        heavy = {"openai", "datasets", "pydantic", "aiohttp", "mettle.envs.environment", "mettle.clients.endpoint_clients"}
        print(sorted(heavy & set(sys.modules)))
        """
    )
    assert said == "[]"


def test_a_star_import_brings_the_names_of_the_path():
    said = in_fresh_process(
        """
        from verifiers.types import *
        from verifiers import *
        print(UserMessage.__name__, SingleTurnEnv.__name__, ErrorChain.__name__, callable(load_environment))
        """
    )
    assert said == "UserMessage SingleTurnEnv ErrorChain True"


PATHS = [
    "verifiers.utils.async_utils:maybe_await maybe_semaphore maybe_retry NullAsyncContext",
    "verifiers.utils.client_utils:setup_openai_client setup_client load_prime_config resolve_client_config",
    "verifiers.utils.config_utils:MissingKeyError ensure_keys",
    "verifiers.utils.data_utils:extract_boxed_answer extract_hash_answer BOXED_SYSTEM_PROMPT",
    "verifiers.utils.env_utils:load_environment",
    "verifiers.utils.error_utils:ErrorChain error_data error_from_data get_error_chain",
    "verifiers.utils.logging_utils:setup_logging log_level quiet_verifiers print_prompt_completions_sample",
    "verifiers.utils.message_utils:concat_messages messages_to_printable sanitize_tool_calls normalize_messages",
    "verifiers.utils.response_utils:parse_response_message parse_response_messages parse_response_tokens",
    "verifiers.utils.save_utils:state_to_output states_to_outputs load_outputs make_serializable",
    "verifiers.utils.thread_utils:get_or_create_thread_attr get_or_create_thread_loop",
    "verifiers.utils.tool_utils:convert_func_to_oai_tool convert_func_to_tool_def is_valid_tool_content_parts",
    "verifiers.decorators:stop cleanup teardown setup update metric reward advantage discover_decorated",
    "verifiers.errors:Error ModelError ToolParseError TunnelError BrowserSandboxError OverlongPromptError",
    "verifiers.types:ContentPart ErrorData EvalConfig RolloutScore RolloutScores TimeSpan Endpoints TaskSplit",
    "verifiers.clients:Client ClientConfig resolve_client OpenAIChatCompletionsClient",
    "verifiers.rubrics.judge_rubric:JudgeRubric",
    "verifiers.rubrics.experimental.hybrid_math_rubric:HybridMathRubric",
    "verifiers.rubrics.tool_rubric:ToolRubric",
    "verifiers.envs.env_group:EnvGroup EnvGroupRubric",
    "verifiers.parsers.maybe_think_parser:MaybeThinkParser",
    "verifiers.envs.sandbox_env:SandboxEnv AdvancedConfigs CreateSandboxRequest AsyncSandboxClient CommandTimeoutError",
    "verifiers.clients:OpenAIClient",
    "verifiers.envs.experimental.composable:ComposableEnv Harness TaskSet SandboxTaskSet SandboxSpec",
    "verifiers.envs.experimental.composable.harnesses.opencode:opencode_harness",
    "verifiers.envs.experimental.opencode_env:OpenCodeEnv",
    "verifiers.envs.experimental.rlm_env:RLMEnv RLMMonitorRubric",
    "verifiers.utils.eval_utils:load_endpoints resolve_endpoints_file",
    "verifiers:AdvancedConfigs OpenAIClient load_endpoints",
    "verifiers:AsyncOpenAI setup_logging ToolCall ErrorChain maybe_await parse_response_messages",
]
NOT_OFFERED = [
    "from verifiers import BrowserEnv, RLTrainer, GRPOTrainer",
    "from verifiers.envs.experimental.composable.tasksets.swe import make_swe_taskset",
    "from verifiers.envs.integrations.browser_env import BrowserEnv",
    "from verifiers.scripts.eval import main",
    "from verifiers.cli.commands.eval import build_parser",
    "from verifiers.workers.server.env_server import EnvServer",
    "from verifiers.serve import EnvClient",
    "from verifiers.rl.trainer import RLTrainer",
    "from verifiers.utils.path_utils import get_results_path",
    "from verifiers.utils.tools import ask, search",
]


def refused(statements: list[str]) -> str:
    """Those of the statements that cannot be executed, each with its error; all in one process."""
    return in_fresh_process(
        f"""
        for statement in {statements!r}:
            try:
                exec(statement, {{}})
            except Exception as error:
                print(f"{{statement}}: {{type(error).__name__}}: {{error}}")
        """
    )


@pytest.mark.parametrize("turn", [1, -1], ids=["in this order", "the other way round"])
def test_paths_have_their_names(turn):
    split = [path.partition(":") for path in PATHS[::turn]]
    assert refused([f"from {module} import {', '.join(names.split())}" for module, _, names in split]) == ""


def test_what_is_not_offered_can_be_imported():
    assert refused(NOT_OFFERED) == ""


def test_what_is_not_offered_says_so_when_it_is_used():
    said = in_fresh_process(
        """
        import verifiers as vf
        from verifiers.scripts.eval import main

        class Mine(vf.BrowserEnv, vf.MultiTurnEnv):
            pass

        for use in (lambda: vf.BrowserEnv(), lambda: Mine(dataset=[]), lambda: main(), lambda: vf.RLTrainer.train):
            try:
                use()
            except Exception as error:
                print(type(error).__name__, error)
        """
    )
    lines = said.splitlines()
    assert len(lines) == 4
    assert all(line.startswith("UserError") and "is not offered here: " in line for line in lines)
    assert "MCPEnv" in lines[0]
    assert "MCPEnv" in lines[1]
    assert "`mettle rl run`" in lines[3]


def test_a_tool_that_is_not_offered_is_refused_by_name():
    said = in_fresh_process(
        """
        import verifiers as vf
        from verifiers.utils.tools import search
        try:
            vf.ToolEnv(dataset=[{"question": "q"}], tools=[search])
        except Exception as error:
            print(type(error).__name__, error)
        """
    )
    assert said.startswith("UserError search of verifiers is not offered here: it asked a web service")


def test_the_module_is_pickled_by_its_name():
    said = in_fresh_process(
        """
        import pickle, verifiers, verifiers.utils.data_utils as module
        print(pickle.loads(pickle.dumps(verifiers)) is verifiers, pickle.loads(pickle.dumps(module)) is module)
        """
    )
    assert said == "True True"


@pytest.mark.parametrize("module", ["verifiers.v1", "verifiers.v1.task"])
def test_the_other_library_under_this_name_is_refused_by_name(module):
    said = in_fresh_process(f"try:\n    import {module}\nexcept ImportError as error:\n    print(error)")
    assert "another library" in said


def test_a_name_that_no_release_had_is_an_import_error():
    said = in_fresh_process(
        """
        for statement in ("from verifiers import nonsense", "import verifiers.nonsense", "import verifiers.utils.nonsense"):
            try:
                exec(statement)
            except ImportError as error:
                print(type(error).__name__)
        """
    )
    assert said.split() == ["ImportError", "ModuleNotFoundError", "ModuleNotFoundError"]


def test_a_verifiers_that_is_imported_already_is_not_replaced(tmp_path):
    (tmp_path / "verifiers.py").write_text("mine = True\n", encoding="utf-8")
    code = """
    import verifiers
    from mettle.envs.legacy.aliases import install_verifiers_alias
    try:
        install_verifiers_alias()
    except Exception as error:
        print(type(error).__name__, verifiers.mine)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{tmp_path}:{SOURCE}"},
        check=True,
    )
    assert done.stdout.strip() == "UserError True"


def test_an_installed_verifiers_is_left_unread(tmp_path):
    (tmp_path / "verifiers.py").write_text("raise RuntimeError('read')\n", encoding="utf-8")
    code = """
    from mettle.envs.legacy.aliases import install_verifiers_alias
    install_verifiers_alias()
    install_verifiers_alias()
    import verifiers
    print(verifiers.SingleTurnEnv.__module__)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{tmp_path}:{SOURCE}"},
        check=True,
    )
    assert done.stdout.strip() == "mettle.envs.singleturn_env"
