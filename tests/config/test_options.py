"""Fields and the names under which they are asked for; every config that is a file, written and read back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

import annotated_types
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from mettle.clients.endpoints import EndpointsFile, NamedEndpoint, PriceTable, Provider
from mettle.clients.prices import Price
from mettle.config import Loaded, load_config, render_toml, shape
from mettle.config.layers import ConfigLayer, tree_layer
from mettle.config.options import Foreign, Given, Option, asked_fields, fields_of, own_names
from mettle.config.overrides import parse_overrides
from mettle.errors import UserError
from mettle.evals.plan import EvalFile, read_plan
from mettle.evals.spec import EvalSpec
from mettle.gepa.config import GepaSpec, load_spec, read_file
from mettle.quality.settings import QualitySettings
from mettle.synthesis.config import GenerateSpec

MODELS = (EvalSpec, GepaSpec, GenerateSpec, QualitySettings, EndpointsFile)


class Table(TypedDict, total=False):
    """A table with one key that has a name at the top."""

    heat: Annotated[float, Field(ge=0), Option("-T")]
    other: int


class Small(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    FOREIGN: ClassVar = {"noise": Foreign(), "limit": Foreign("there is none here", (0,))}

    size: Annotated[int, Option("-n", also=("num", "count"))] = 1
    table: Annotated[Table, Option(also=("short",))] = {}
    names: Annotated[list[str], Option(read=lambda value: value.split(",") if isinstance(value, str) else value)] = []
    file: Annotated[str | None, Option(is_path=True)] = None


def own(tree: dict[str, Any], folder: Path | None = None) -> ConfigLayer:
    return own_names(Small, tree_layer(tree, "a.toml:1"), folder)


def test_other_names_are_brought_to_the_own_ones_with_their_sources():
    layer = own({"num": 3, "short": {"other": 1}, "heat": 0.5, "names": "a,b", "noise": True, "limit": 0})
    assert layer.tree == {"size": 3, "table": {"other": 1, "heat": 0.5}, "names": ["a", "b"]}
    assert {layer.source_of(path) for path in (("size",), ("table", "heat"), ("names", 0))} == {"a.toml:1"}
    assert load_config(Small, overrides=["--short.heat", "2", "--count", "4"]).config == Small(
        size=4, table={"heat": 2.0}
    )


def test_a_tables_own_key_outweighs_its_short_name_in_one_layer_and_the_stronger_layer_wins_over_both(tmp_path):
    assert own({"heat": 0.5, "table": {"heat": 0.1}}).tree == {"table": {"heat": 0.1}}
    (tmp_path / "a.toml").write_text("[table]\nheat = 0.1\nother = 3\n")
    (tmp_path / "b.toml").write_text("heat = 0.2\n")
    loaded = load_config(Small, [tmp_path / "a.toml", tmp_path / "b.toml"])
    assert loaded.config.table == {"heat": 0.2, "other": 3}
    assert loaded.sources["table.heat"] == f"{tmp_path}/b.toml:1"


def test_a_file_stands_beside_the_one_that_names_it_when_it_is_there(tmp_path):
    (tmp_path / "there").touch()
    assert own({"file": "there"}, tmp_path).tree == {"file": str(tmp_path / "there")}
    assert own({"file": "elsewhere"}, tmp_path).tree == {"file": "elsewhere"}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"num": 1, "size": 2}, "a.toml:1: num and size are the same setting; keep one"),
        ({"num": 1, "count": 2}, "a.toml:1: count and size are the same setting; keep one"),
        ({"limit": 5}, "a.toml:1: limit = 5: there is none here"),
    ],
)
def test_what_contradicts_itself_or_has_no_effect_is_one_line(tree, message):
    with pytest.raises(UserError) as caught:
        own(tree)
    assert str(caught.value) == message


def test_a_slip_in_a_second_name_is_told_the_nearest(tmp_path):
    with pytest.raises(UserError, match="unknown key 'countt'; did you mean 'count'"):
        load_config(Small, overrides=["--countt", "3"])


@pytest.mark.parametrize("model", MODELS)
def test_every_name_that_a_file_may_use_means_one_field(model):
    names = [name for asked in asked_fields(model) for name in {asked.name, *asked.option.also}]
    assert len(names) == len(set(names))
    assert set(names) <= set(fields_of(model))


# Every model, written and read back


words = st.text(max_size=8).filter(lambda text: text != "None")
free = st.recursive(
    st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), words),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(words, inner, max_size=2)),
    max_leaves=4,
)
SPECIAL = {
    **dict.fromkeys(("endpoints_path", "env_dir_path", "results"), st.none() | st.just("no/such/file")),
    "near": st.floats(0.1, 1.01), "held_out": st.floats(0.0, 0.9), "shuffle": st.just(False),
    "num_examples": st.integers(1) | st.just(-1), "num_tasks": st.integers(1) | st.just(-1),
    "preset": st.none() | st.sampled_from(["math", "json"]), "reward_range": st.none() | st.just((0.0, 2.5)),
    "timeout_s": st.floats(0.1, 60.0), "type": st.sampled_from(["openai_responses", "renderer"]),
    "formats": st.lists(st.sampled_from(["jsonl", "parquet"]), min_size=1),
}  # fmt: skip


def values_of(annotation: Any, metadata: tuple[Any, ...] = ()) -> st.SearchStrategy[Any]:
    """Values of an annotation, within its bounds."""
    if annotation is PriceTable:
        return st.builds(Price, st.floats(0.0, 1e6), st.floats(0.0, 1e6))
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return values_of(args[0], tuple(m for item in args[1:] for m in getattr(item, "metadata", [item])))
    least = next((m.ge for m in metadata if isinstance(m, annotated_types.Ge)), None)
    if annotation is bool:
        return st.booleans()
    if annotation is int:
        return st.integers(least)
    if annotation is float:
        return st.floats(least, allow_nan=False, allow_infinity=False)
    if annotation is str:
        return words
    if annotation in (None, type(None)):
        return st.none()
    if annotation is Any:
        return free
    if origin is Literal:
        return st.sampled_from(args)
    if origin is dict:
        return st.dictionaries(words, values_of(args[1]), max_size=2)
    if origin is list:
        return st.lists(values_of(args[0]), max_size=2)
    if annotation in MODELS or annotation in (NamedEndpoint, Provider):
        return models_of(annotation)
    if shape.typed_keys(annotation):
        keys = {name: values_of(inner) for name, inner in shape.typed_keys(annotation).items()}
        return st.fixed_dictionaries({}, optional={**keys, "top_p": st.floats(0.0, 1.0)})
    return st.one_of(*(values_of(member, metadata) for member in args))


def models_of(model: type[BaseModel]) -> st.SearchStrategy[Any]:
    """Instances of a model."""
    fields = {
        name: SPECIAL[name] if name in SPECIAL else values_of(info.annotation, tuple(info.metadata))
        for name, info in model.model_fields.items()
    }
    return st.fixed_dictionaries(fields).map(lambda values: model.model_validate(values))


def one(load: Callable[[Path], Loaded[Any]]) -> Callable[[str, Path], Any]:
    def read(text: str, path: Path) -> Any:
        path.write_text(text, encoding="utf-8", newline="")
        return load(path).config

    return read


READERS: dict[type[BaseModel], tuple[Callable[[Any], str], Callable[[str, Path], Any]]] = {
    EvalSpec: (
        lambda spec: render_toml(EvalFile(eval=[spec])),
        one(lambda path: read_plan([path], Given(), lambda env_id: ConfigLayer())[0]),
    ),
    GepaSpec: (render_toml, one(lambda path: load_spec([read_file(path)]))),
    GenerateSpec: (render_toml, one(lambda path: load_config(GenerateSpec, [path]))),
    QualitySettings: (render_toml, one(lambda path: load_config(QualitySettings, [path]))),
    EndpointsFile: (render_toml, one(lambda path: load_config(EndpointsFile, [path]))),
}


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_config_written_as_toml_loads_back_equal(model, data, tmp_path_factory):
    config = data.draw(models_of(model))
    write, read = READERS[model]
    assert read(write(config), tmp_path_factory.mktemp("written") / "config.toml") == config


def test_given_values_are_layers_and_overrides_in_one():
    said = Given(tree_layer({"size": 2}, "--size"), tuple(parse_overrides(["--table.heat", "0.5"])))
    loaded = load_config(Small, (), said.with_value("file", "x", "command line"))
    assert loaded.config == Small(size=2, table={"heat": 0.5}, file="x")
    assert (loaded.sources["size"], loaded.sources["file"]) == ("--size", "command line")
    assert bool(said)
    assert not Given()
