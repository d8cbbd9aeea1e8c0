"""Finding, listing, loading and making environments; and what importing the library costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mettle.envs as vf
from mettle.envs.packages.loading import parse_environment_id
from mettle.envs.packages.registry import find_environment, list_environments, search_path
from mettle.envs.packages.scaffold import create_environment
from mettle.errors import UserError

SOURCE = Path(__file__).resolve().parents[3] / "src"
V0_MODULE = """
import verifiers as vf
from verifiers.types import Messages, State
from verifiers.rubrics.rubric import Rubric
from verifiers.utils.data_utils import extract_boxed_answer
import verifiers.envs.multiturn_env as multi
from verifiers.clients import Client
from verifiers.envs import SingleTurnEnv

def load_environment(n: int = 1, fail: bool = False):
    assert Rubric is vf.Rubric and multi.MultiTurnEnv is vf.MultiTurnEnv
    if fail:
        raise ZeroDivisionError("oh")
    return vf.SingleTurnEnv(dataset=[{"question": "q", "answer": "a", "task": "old-style"}] * n)
"""


def run_python(code, *, cwd=None, **environ):
    path = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, **environ},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of environments, searched by way of METTLE_ENVIRONMENTS."""
    (tmp_path / "v0_toy").mkdir()
    (tmp_path / "v0_toy" / "v0_toy.py").write_text(V0_MODULE)
    (tmp_path / "v0_toy" / "pyproject.toml").write_text('[project]\nname = "v0-toy"\nversion = "0.2.0"\n')
    monkeypatch.setenv("METTLE_ENVIRONMENTS", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("verifiers", "v0_toy")]:
        del sys.modules[name]


def test_an_environment_written_for_verifiers_loads_unchanged(folder):
    env = vf.load_environment("someone/v0_toy@0.2.0", n=3)
    assert isinstance(env, vf.SingleTurnEnv)
    assert (len(env.get_dataset()), env.env_id, env.env_version) == (3, "v0_toy", "0.2.0")
    assert env.env_args == {"n": 3}


def test_what_is_wrong_with_the_name_the_version_or_the_arguments_is_said(folder):
    with pytest.raises(
        UserError, match=r"no environment 'v0-toi'; searched installed packages, .*did you mean 'v0-toy'"
    ):
        vf.load_environment("v0-toi")
    with pytest.raises(UserError, match=r"version 0\.2\.0 is here .*, not 0\.3\.0"):
        vf.load_environment("v0-toy@0.3.0")
    with pytest.raises(UserError, match="takes no argument 'm'; it takes n, fail"):
        vf.load_environment("v0-toy", m=1)
    with pytest.raises(RuntimeError, match="ZeroDivisionError: oh"):
        vf.load_environment("v0-toy", fail=True)
    with pytest.raises(UserError, match="no environment id"):
        vf.load_environment("owner/")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1", "no function load_environment"),
        ("import nothing_of_this_name", "needs the module 'nothing_of_this_name'"),
        ("def (", "SyntaxError"),
    ],
)
def test_a_module_that_cannot_be_used_says_why(folder, text, says):
    (folder / "v0_toy" / "v0_toy.py").write_text(text)
    with pytest.raises((UserError, RuntimeError), match=says):
        vf.load_environment("v0-toy")


def test_ids_come_apart():
    full = parse_environment_id("owner/name@1.0")
    assert (full.owner, full.name, full.version) == ("owner", "name", "1.0")
    assert parse_environment_id("name@latest").version is None


def test_another_verifiers_is_never_replaced(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", json)
    with pytest.raises(UserError, match="another verifiers is imported already"):
        vf.load_environment("v0-toy")
    assert sys.modules["verifiers"] is json


def test_listing_finds_everything_and_imports_nothing(folder):
    (folder / "broken").mkdir()
    (folder / "broken" / "pyproject.toml").write_text('[project]\nname = "broken"\n')
    (folder / "broken" / "broken.py").write_text("raise SystemExit(1)")
    names = [entry.name for entry in list_environments()]
    assert {"arithmetic", "broken", "number-guess", "reverse-text", "v0-toy"} <= set(names)
    assert names == sorted(names)
    assert "v0_toy" not in sys.modules
    assert find_environment("Reverse_Text").module == "reverse_text"
    assert folder.resolve() in search_path()


def test_a_folder_that_was_named_comes_before_what_ships(folder, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    (folder / "reverse_text").mkdir()
    (folder / "reverse_text" / "pyproject.toml").write_text('[project]\nname = "reverse-text"\n')
    assert find_environment("reverse-text").folder == (folder / "reverse_text").resolve()


def test_a_manifest_that_cannot_be_read_is_named(folder):
    (folder / "v0_toy" / "pyproject.toml").write_text("[project")
    with pytest.raises(UserError, match=r"cannot read .*v0_toy/pyproject\.toml"):
        find_environment("v0-toy")


def test_an_installed_package_comes_first(folder, tmp_path, monkeypatch):
    site = tmp_path / "site"
    info = site / "reverse_text-9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: reverse-text\nVersion: 9.9\nSummary: Mine.\n")
    (info / "entry_points.txt").write_text("[mettle.envs]\nreverse-text = mine:load_environment\n")
    monkeypatch.syspath_prepend(str(site))
    entry = find_environment("reverse-text")
    assert (entry.version, entry.module, entry.origin, entry.description) == ("9.9", "mine", "installed", "Mine.")


def test_an_editable_installation_knows_its_folder_and_one_that_ships_yields_to_a_named_folder(
    folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    site, mine = tmp_path / "site", tmp_path / "mine"
    mine.mkdir()
    shipped = Path(__file__).resolve().parents[3] / "environments" / "reverse_text"
    for name, source in (("mine", mine), ("reverse-text", shipped)):
        info = site / f"{name.replace('-', '_')}-9.9.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")
        (info / "entry_points.txt").write_text(f"[mettle.envs]\n{name} = module:load_environment\n")
        origin = {"url": source.as_uri(), "dir_info": {"editable": True}}
        (info / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(str(site))
    assert find_environment("mine").folder == mine.resolve()
    assert find_environment("reverse-text").folder == shipped
    (folder / "reverse_text").mkdir()
    (folder / "reverse_text" / "pyproject.toml").write_text('[project]\nname = "reverse-text"\n')
    assert find_environment("reverse-text").folder == (folder / "reverse_text").resolve()


def test_a_new_package_loads_and_passes_its_own_test(tmp_path):
    package = create_environment("My_Task", tmp_path / "environments")
    code = (
        "import pytest, sys; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-c', '/dev/null', "
        f"'{package / 'tests'}']))"
    )
    assert "3 passed" in run_python(code, cwd=tmp_path)
    with pytest.raises(UserError, match="exists already"):
        create_environment("my-task", tmp_path / "environments")
    for bad in ("9lives", "class", "a b", "../up", ""):
        with pytest.raises(UserError, match="cannot be an environment's name"):
            create_environment(bad, tmp_path)


def test_importing_the_library_is_light():
    code = (
        "import time, sys; start = time.process_time(); import mettle.envs as vf; vf.SingleTurnEnv; vf.XMLParser; "
        "spent = time.process_time() - start; "
        "heavy = {'torch', 'openai', 'datasets', 'pydantic', 'aiohttp', 'numpy', 'transformers'} & set(sys.modules); "
        "print(spent, sorted(heavy))"
    )
    spent, heavy = run_python(code).split(maxsplit=1)
    assert heavy.strip() == "[]"
    assert float(spent) < 1.0


def test_every_name_that_is_offered_is_there():
    for name in vf.__all__:
        assert getattr(vf, name) is not None
    with pytest.raises(AttributeError, match="has no 'Nothing'"):
        _ = vf.Nothing


@pytest.mark.parametrize("layout", ["folder", "src", "entry point"])
def test_names_with_capitals_are_found_as_they_are_spelt(folder, layout):
    package = folder / "BigBench_BBH"
    root = package / "src" if layout == "src" else package
    root.mkdir(parents=True)
    (root / "BigBench_BBH.py").write_text(V0_MODULE)
    manifest = '[project]\nname = "BigBench-BBH"\nversion = "1"\n'
    if layout == "entry point":
        manifest += '[project.entry-points."mettle.envs"]\nBigBench-BBH = "BigBench_BBH"\n'
    (package / "pyproject.toml").write_text(manifest)
    for name in ("bigbench-bbh", "BigBench-BBH", "BigBench_BBH"):
        assert find_environment(name).module == "BigBench_BBH"
    sys.modules.pop("BigBench_BBH", None)
    assert vf.load_environment("BigBench_BBH").env_id == "BigBench_BBH"
    del sys.modules["BigBench_BBH"]


def test_an_installed_package_with_capitals_is_found_too(folder, monkeypatch):
    (folder / "Big_Thing.py").write_text(V0_MODULE)
    facts = folder / "Big_Thing-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: Big-Thing\nVersion: 1\n")
    (facts / "RECORD").write_text("Big_Thing.py,,\nBig_Thing-1.dist-info/METADATA,,\n")
    sys.path.insert(0, str(folder))
    assert find_environment("big-thing").module == "Big_Thing"
