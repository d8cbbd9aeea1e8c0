"""`import verifiers` in an interpreter that nobody prepared: Mettle's, unless a verifiers is really installed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
HOOK = SOURCE / "mettle_names.pth"


@pytest.fixture
def site_folder(tmp_path):
    """A folder as pip makes it: the hook, and the line of an editable installation."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / HOOK.name).write_bytes(HOOK.read_bytes())
    (folder / "_mettle_lab.pth").write_text(f"{SOURCE}\n", encoding="utf-8")
    return folder


def run(site_folder: Path, code: str, cwd: Path | None = None, *flags: str) -> str:
    """What a new interpreter prints that reads `site_folder`; with `-S`, it has nothing else but the standard library."""
    start = f"import site, sys; site.addsitedir({str(site_folder)!r}); sys.path.insert(0, '')\n"
    done = subprocess.run(
        [sys.executable, *flags, "-c", start + textwrap.dedent(code)],
        capture_output=True, text=True, check=False, cwd=cwd or site_folder, env={"PATH": "/usr/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.strip()


def test_any_interpreter_of_the_installation_imports_verifiers(site_folder):
    said = run(
        site_folder,
        """
        import verifiers as vf
        from verifiers.envs.tool_env import ToolEnv
        import verifiers.utils.data_utils
        from prime_sandboxes import AsyncSandboxClient
        from prime_sandboxes.models import CreateSandboxRequest
        print(vf.SingleTurnEnv.__module__, ToolEnv is vf.ToolEnv, vf.load_environment.__module__)
        """,
    )
    assert said == "mettle.envs.singleturn_env True mettle.envs.packages.loading"


def test_environments_still_load_in_a_process_that_imported_it_by_itself(site_folder):
    said = run(
        site_folder,
        "import verifiers as vf; print(isinstance(vf.load_environment('reverse-text'), vf.SingleTurnEnv))",
    )
    assert said == "True"


def test_the_start_of_an_interpreter_imports_one_small_file(site_folder):
    said = run(site_folder, "print(sorted(name for name in sys.modules if name.startswith('mettle')))", None, "-S")
    assert said == "['mettle', 'mettle.import_names']"


@pytest.mark.parametrize("kind", ["package", "editable", "finder"])
def test_a_verifiers_that_is_installed_is_the_one_that_is_imported(site_folder, tmp_path, kind):
    real = (tmp_path / "checkout" if kind != "package" else site_folder) / "verifiers"
    real.mkdir(parents=True)
    (real / "__init__.py").write_text("real = True\n", encoding="utf-8")
    (real / "types.py").write_text("deep = True\n", encoding="utf-8")
    if kind == "editable":
        (site_folder / "zzz_verifiers.pth").write_text(f"{real.parent}\n", encoding="utf-8")
    if kind == "finder":
        (site_folder / "finding.py").write_text(
            f"""
import importlib.util, sys
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "verifiers":
            return importlib.util.spec_from_file_location(
                name, {str(real / "__init__.py")!r}, submodule_search_locations=[{str(real)!r}])
sys.meta_path.append(Finder)
""",
            encoding="utf-8",
        )
        (site_folder / "zzz_verifiers.pth").write_text("import finding\n", encoding="utf-8")
    said = run(
        site_folder, "import verifiers, verifiers.types; print(verifiers.real, verifiers.types.deep)", None, "-S"
    )
    assert said == "True True"


def test_a_folder_of_that_name_without_code_is_no_installation(site_folder, tmp_path):
    (tmp_path / "work" / "verifiers" / "docs").mkdir(parents=True)
    said = run(site_folder, "import verifiers; print(verifiers.ToolEnv.__name__)", tmp_path / "work")
    assert said == "ToolEnv"


def test_other_names_are_nobodys_business(site_folder):
    said = run(
        site_folder,
        """
        for statement in ("import verifiers_rl", "import verifiers.nonsense"):
            try:
                exec(statement)
            except ModuleNotFoundError as error:
                print(error)
        """,
    )
    assert said.splitlines() == ["No module named 'verifiers_rl'", "No module named 'verifiers.nonsense'"]


def test_an_interpreter_whose_mettle_was_taken_away_starts_in_silence(site_folder):
    (site_folder / "_mettle_lab.pth").unlink()
    assert (
        run(site_folder, "print('started', [name for name in sys.modules if 'mettle' in name])", None, "-S")
        == "started []"
    )


def test_the_wheel_and_the_editable_installation_have_the_hook():
    """Hatch puts forced files at the top of both."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {"src/mettle_names.pth": HOOK.name}
