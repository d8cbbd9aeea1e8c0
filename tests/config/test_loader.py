"""Loading a config: composition, overrides, sources, and errors that say where."""

from __future__ import annotations

import re
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from mettle.config import load_config, render_toml
from mettle.errors import UserError


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Adam(Strict):
    type: Literal["adamw"] = "adamw"
    lr: float = Field(1e-5, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)


class Muon(Strict):
    type: Literal["muon"] = "muon"
    lr: float = 1e-3
    momentum: float = 0.95


class Mode(StrEnum):
    KEEP = "keep"
    DRAIN = "drain"


class Checkpoints(Strict):
    interval: int = 10
    keep: int | None = 3


class Trainer(Strict):
    optim: Annotated[Adam | Muon, Field(discriminator="type")] = Field(default_factory=lambda: Adam(lr=3e-4))
    compile: bool = True
    seq_len: int | None = None
    ckpt: Checkpoints | None = None

    @field_validator("seq_len")
    @classmethod
    def _positive(cls, value: int | None) -> int | None:
        if value is not None and value < 1:
            raise ValueError("a sequence has at least one token; set it to 1 or more")
        return value


class Env(Strict):
    id: str
    args: dict[str, Any] = {}
    weight: float = 1.0


class Run(Strict):
    name: str = "demo"
    seq_len: int = 128
    max_steps: int = 20
    group_size: int = 8
    mode: Mode = Mode.KEEP
    dir: Path = Path("runs")
    tags: list[str] = []
    trainer: Trainer = Trainer()
    envs: list[Env] = Field(default_factory=lambda: [Env(id="reverse-text", weight=2.0)])
    options: dict[str, Any] = {}

    @model_validator(mode="after")
    def _rules(self) -> Run:
        if "clip" in self.options:
            raise ValueError("options: nothing here is clipped")
        if self.group_size == 1:
            raise ValueError("group_size = 1 leaves nothing to compare; set it to 2 or more")
        if self.trainer.seq_len is None:
            self.trainer.seq_len = self.seq_len
        return self


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write_file(name: str, text: str) -> Path:
        Path(name).write_text(text)
        return Path(name)

    return write_file


def complaint(files=(), overrides=()) -> str:
    with pytest.raises(UserError) as caught:
        load_config(Run, files, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Composition


def test_later_files_win_tables_merge_and_lists_are_replaced(write):
    base = write(
        "base.toml", 'max_steps = 5\ntags = ["a", "b"]\n[trainer]\ncompile = false\n[trainer.optim]\nlr = 1e-4\n'
    )
    mine = write("mine.toml", 'tags = ["c"]\n[trainer.optim]\nbetas = [0.8, 0.9]\n')
    loaded = load_config(Run, [base, mine])
    assert loaded.config.tags == ["c"]
    assert loaded.config.trainer.optim == Adam(lr=1e-4, betas=(0.8, 0.9))
    assert loaded.config.trainer.compile is False
    assert loaded.sources["trainer.optim.lr"] == "base.toml:6"
    assert loaded.sources["trainer.optim.betas"] == "mine.toml:3"
    assert loaded.sources["tags"] == "mine.toml:1"
    assert loaded.sources["trainer.compile"] == "base.toml:4"
    assert loaded.sources["max_steps"] == "base.toml:1"


def test_a_list_of_tables_is_replaced_with_its_sources(write):
    base = write("base.toml", '[[envs]]\nid = "a"\n[[envs]]\nid = "b"\n')
    mine = write("mine.toml", '\n[[envs]]\nid = "c"\n')
    loaded = load_config(Run, [base, mine])
    assert [env.id for env in loaded.config.envs] == ["c"]
    assert loaded.sources["envs.0.id"] == "mine.toml:3"
    assert loaded.sources["envs.0.weight"] == "default"


def test_setting_one_key_of_a_table_keeps_the_rest_of_its_default(write):
    file = write("run.toml", "[trainer.optim]\nbetas = [0.5, 0.5]\n")
    optim = load_config(Run, [file]).config.trainer.optim
    assert isinstance(optim, Adam)
    assert optim.lr == 3e-4, "the default of the field, not of its class"


def test_choosing_another_variant_starts_from_that_variants_defaults(write):
    loaded = load_config(Run, [write("run.toml", '[trainer.optim]\ntype = "muon"\n')])
    assert loaded.config.trainer.optim == Muon()
    assert loaded.sources["trainer.optim.momentum"] == "default"


def test_built_in_defaults_lie_under_the_files(write):
    file = write("run.toml", "[trainer]\ncompile = false\n")
    loaded = load_config(
        Run, [file], defaults={"max_steps": 7, "trainer": {"compile": True, "seq_len": 64}}, defaults_name="recipe"
    )
    assert (loaded.config.max_steps, loaded.config.trainer.compile, loaded.config.trainer.seq_len) == (7, False, 64)
    assert loaded.sources["max_steps"] == "recipe"
    assert loaded.sources["trainer.seq_len"] == "recipe"
    assert loaded.sources["trainer.compile"] == "run.toml:2"


def test_a_value_that_a_rule_computed_is_called_derived():
    loaded = load_config(Run, overrides=["--seq-len", "64"])
    assert loaded.config.trainer.seq_len == 64
    assert loaded.sources["trainer.seq_len"] == "derived"
    assert loaded.sources["seq_len"] == "--seq-len"
    assert loaded.sources["trainer.compile"] == "default"


def test_every_resolved_value_has_a_source():
    loaded = load_config(Run)
    assert set(loaded.sources) == {
        "name", "seq_len", "max_steps", "group_size", "mode", "dir", "tags", "trainer.optim.type", "trainer.optim.lr",
        "trainer.optim.betas", "trainer.compile", "trainer.seq_len", "trainer.ckpt", "envs.0.id", "envs.0.args",
        "envs.0.weight", "options",
    }  # fmt: skip


# Overrides


@pytest.mark.parametrize(
    ("tokens", "read", "expected"),
    [
        (["--trainer.optim.lr", "3e-6"], lambda c: c.trainer.optim.lr, 3e-6),
        (["--trainer.optim.lr=3e-6"], lambda c: c.trainer.optim.lr, 3e-6),
        (["--max-steps", "3"], lambda c: c.max_steps, 3),
        (["--max_steps", "3"], lambda c: c.max_steps, 3),
        (["--name", "42"], lambda c: c.name, "42"),
        (["--name", "two words"], lambda c: c.name, "two words"),
        (["--name", '"quoted"'], lambda c: c.name, "quoted"),
        (["--name="], lambda c: c.name, ""),
        (["--mode", "drain"], lambda c: c.mode, Mode.DRAIN),
        (["--dir", "2025-01-01"], lambda c: c.dir, Path("2025-01-01")),
        (["--no-trainer.compile"], lambda c: c.trainer.compile, False),
        (["--trainer.no-compile"], lambda c: c.trainer.compile, False),
        (["--trainer.compile"], lambda c: c.trainer.compile, True),
        (["--trainer.compile", "false"], lambda c: c.trainer.compile, False),
        (["--trainer.ckpt"], lambda c: c.trainer.ckpt, Checkpoints()),
        (["--trainer.ckpt.keep", "None"], lambda c: c.trainer.ckpt, Checkpoints(keep=None)),
        (["--trainer.ckpt.interval", "2", "--no-trainer.ckpt"], lambda c: c.trainer.ckpt, None),
        (["--trainer.optim.type", "muon"], lambda c: c.trainer.optim, Muon()),
        (["--tags", '["x", "y"]'], lambda c: c.tags, ["x", "y"]),
        (["--envs.0.id", "arithmetic"], lambda c: c.envs, [Env(id="arithmetic", weight=2.0)]),
        (["--envs.1.id", "b"], lambda c: [e.id for e in c.envs], ["reverse-text", "b"]),
        (["--envs.0.args.length", "4"], lambda c: c.envs[0].args, {"length": 4}),
        (["--envs.0.args", '{length = 4, word = "a"}'], lambda c: c.envs[0].args, {"length": 4, "word": "a"}),
        (["--max-steps", "3", "--max-steps", "4"], lambda c: c.max_steps, 4),
        (["--trainer.seq-len", "-1", "--trainer.seq-len", "9"], lambda c: c.trainer.seq_len, 9),
    ],
)
def test_overrides_set_values(tokens, read, expected):
    assert read(load_config(Run, overrides=tokens).config) == expected


def test_overrides_win_over_files_and_say_so(write):
    file = write("run.toml", "max_steps = 5\n")
    loaded = load_config(Run, [file], ["--max-steps", "6"])
    assert loaded.config.max_steps == 6
    assert loaded.sources["max_steps"] == "--max-steps"


def test_overrides_may_be_typed_values_by_dotted_name():
    loaded = load_config(Run, overrides={"trainer.optim.lr": 0.5, "envs.0.id": "x", "tags": ["t"]})
    assert (loaded.config.trainer.optim.lr, loaded.config.envs[0].id, loaded.config.tags) == (0.5, "x", ["t"])


@pytest.mark.parametrize("spelled", [["trainer.toml"], ["@trainer.toml"], ["@", "trainer.toml"]])
def test_a_file_is_laid_over_one_table_with_its_lines_as_sources(write, spelled):
    write("trainer.toml", "[optim]\nlr = 0.5\n")
    whole = write("whole.toml", "[trainer.optim]\nbetas = [0.1, 0.2]\nlr = 0.1\n")
    loaded = load_config(Run, [whole], ["--trainer", *spelled])
    assert (loaded.config.trainer.optim.lr, loaded.config.trainer.optim.betas) == (0.5, (0.1, 0.2))
    assert loaded.sources["trainer.optim.lr"] == "trainer.toml:2"
    later = load_config(Run, [whole], ["--trainer", *spelled, "--trainer.optim.lr", "0.7"])
    assert later.config.trainer.optim.lr == 0.7


def test_a_file_over_a_table_that_does_not_fit_is_one_line(write):
    assert complaint([], ["--trainer", "trainer.toml"]) == "no config file trainer.toml"
    write("trainer.toml", "optin = 3\n")
    said = complaint([], ["--trainer", "trainer.toml"])
    assert said.startswith("trainer.toml:1: unknown key 'trainer.optin'; did you mean 'optim'")
    said = complaint([], ["--envs.0.id", "words", "--envs.0", "trainer.toml"])
    assert said == "--envs.0 trainer.toml: a file is laid over a table, not over an entry of a list"


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["stray"], "unexpected 'stray': config files come first"),
        (["--max-steps"], "--max-steps needs a value"),
        (["--max-stepz", "3"], "--max-stepz: unknown key 'max_stepz'; did you mean 'max_steps'?"),
        (
            ["--trainer.optim.lr", "fast"],
            '--trainer.optim.lr: trainer.optim.lr = "fast": input should be a valid number',
        ),
        (["--envs.4.id", "x"], "--envs.4.id: envs has 1 entries, so the next index is 1, not 4"),
        (["--envs.id", "x"], "--envs.id: envs is a list, so address it by index, as in --envs.0"),
        (["--trainer..lr", "x"], "is not a key"),
        (["--trainer.optim.type", "adam"], "trainer.optim.type = \"adam\": no such type; did you mean 'adamw'?"),
        (["--options.clip", "1"], "--options.clip: options: nothing here is clipped"),
        (["--options", "{clip = 1}"], "--options: options: nothing here is clipped"),
        (["--mode", "kep"], "--mode: mode = \"kep\": input should be 'keep' or 'drain'"),
    ],
)
def test_overrides_that_are_wrong_are_refused_in_one_line(tokens, message):
    assert message in complaint(overrides=tokens)


# Errors in files


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trainer.optim]\nlrr = 1", "run.toml:2: unknown key 'trainer.optim.lrr' (type 'adamw'); did you mean 'lr'?"),
        ("[trainer]\noptim = {lrr = 1}", "run.toml:2: unknown key 'trainer.optim.lrr'"),
        (
            '[trainer.optim]\ntype = "muon"\nbetas = [1, 2]',
            "run.toml:3: unknown key 'trainer.optim.betas' (type 'muon')",
        ),
        ("max_steps = 1\n\nmax-stepz = 2", "run.toml:3: unknown key 'max-stepz'; did you mean 'max_steps'?"),
        ("z = 1", "run.toml:1: unknown key 'z'; the top level has name, seq_len,"),
        ('max_steps = "many"', 'run.toml:1: max_steps = "many": input should be a valid integer'),
        ("tags = [\n  'a',\n  1,\n]", "run.toml:3: tags.1 = 1: input should be a valid string"),
        ("[trainer]\nseq_len = 0", "run.toml:2: trainer.seq_len = 0: a sequence has at least one token; set it to 1"),
        ("[trainer.optim]\nlr = -1.0", "run.toml:2: trainer.optim.lr = -1.0: input should be greater than 0"),
        ("name = 'x'\ngroup_size = 1", "run.toml:2: group_size = 1 leaves nothing to compare; set it to 2 or more"),
        (
            "[[envs]]\nweight = 1",
            "run.toml:1: envs.0.id is missing and has no default; set it in a file or with --envs.0.id",
        ),
        (
            '[[envs]]\nid = "a"\n[[envs]]\nid = "b"\nwieght = 2',
            "run.toml:5: unknown key 'envs.1.wieght'; did you mean 'weight'?",
        ),
        (
            '[trainer.optim]\ntype = "sgd"',
            'run.toml:2: trainer.optim.type = "sgd": no such type; it is one of adamw, muon',
        ),
        ("trainer = 3", "run.toml:1: trainer = 3: "),
        ("a = 1\nb ==", "run.toml:2: not valid TOML: "),
        ('name = "abc', "run.toml:1: not valid TOML: "),
        ("max_steps = 1\nmax_steps = 2", "run.toml:2: not valid TOML: "),
    ],
)
def test_errors_in_a_file_name_the_line_the_key_and_the_way_out(write, text, message):
    assert message in complaint([write("run.toml", text)])


def test_several_mistakes_are_named_in_one_line_the_first_in_full(write):
    line = complaint([write("run.toml", 'zz = 1\n[trainer]\ncompile = "perhaps"\nseq_len = "x"\n')])
    assert line.startswith("run.toml:1: unknown key 'zz'")
    assert "also wrong: trainer.compile, trainer.seq_len" in line


class Hosted(Strict):
    """A model that reads a flat spelling by moving its values."""

    trainer: Trainer = Trainer()
    envs: list[Env] = []

    @model_validator(mode="before")
    @classmethod
    def _move(cls, tree: dict[str, Any]) -> dict[str, Any]:
        moved = {"trainer": {"optim": {"type": "adamw", "lr": tree["learning_rate"]}}, "envs": tree.get("env", [])}
        return moved


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rate = -1", "run.toml: trainer.optim.lr = -1: input should be greater than 0"),
        ("learning_rate = 1\n[[env]]\nid = 'a'\nwieght = 1", "run.toml: unknown key 'envs.0.wieght'"),
        ("learning_rate = 1\n[[env]]\nweight = 1", "run.toml: envs.0.id is missing"),
    ],
)
def test_a_value_that_a_rule_moved_is_named_where_it_went(write, text, message):
    with pytest.raises(UserError, match="^" + re.escape(message)):
        load_config(Hosted, [write("run.toml", text)])


def test_a_missing_file_a_folder_and_binary_are_refused(write, tmp_path):
    assert complaint([Path("none.toml")]) == "no config file none.toml"
    assert "cannot read" in complaint([tmp_path])
    Path("raw.toml").write_bytes(b"\xff\xfe")
    assert "is not UTF-8 text" in complaint([Path("raw.toml")])


# Rendering


def test_the_rendered_config_names_sources_and_loads_back(write):
    loaded = load_config(Run, [write("run.toml", "max_steps = 5\n")], ["--trainer.ckpt.keep", "None"])
    text = loaded.render()
    assert re.search(r"^max_steps = 5 +# run.toml:1$", text, re.MULTILINE)
    assert re.search(r'^keep = "None" +# --trainer.ckpt.keep$', text, re.MULTILINE)
    assert re.search(r"^lr = 0.0003 +# default$", text, re.MULTILINE)
    again = load_config(Run, [write("again.toml", text)])
    assert again.config == loaded.config


words = st.text(max_size=12).filter(lambda text: text != "None")
scalars = st.one_of(st.integers(), st.floats(allow_nan=False), st.booleans(), words)
free = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)),
    max_leaves=6,
)
runs = st.builds(
    Run,
    name=words,
    tags=st.lists(words, max_size=3),
    mode=st.sampled_from(Mode),
    dir=st.sampled_from([Path("runs"), Path("a b/c")]),
    trainer=st.builds(
        Trainer,
        optim=st.one_of(st.builds(Adam, lr=st.floats(1e-9, 1.0)), st.builds(Muon, momentum=st.floats(allow_nan=False))),
        ckpt=st.one_of(st.none(), st.builds(Checkpoints, keep=st.one_of(st.none(), st.integers()))),
    ),
    envs=st.lists(st.builds(Env, id=words, args=st.dictionaries(words, free, max_size=3)), max_size=3),
)


@settings(max_examples=150, deadline=None)
@given(config=runs)
def test_any_config_rendered_loads_back_equal(config, tmp_path_factory):
    path = tmp_path_factory.mktemp("render") / "config.toml"
    path.write_text(render_toml(config), encoding="utf-8", newline="")
    assert load_config(Run, [path]).config == config


def test_loading_a_config_imports_no_torch():
    code = "import sys, mettle.config; sys.exit('torch' in sys.modules or 'tomlkit' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
