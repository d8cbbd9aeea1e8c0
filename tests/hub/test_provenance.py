"""Settings, each with the place where it was made."""

from mettle.hub.provenance import flatten, read_settings


def test_a_config_is_flattened_values_first():
    tree = {"a": {"x": 1, "deep": {"y": [1, 2]}}, "z": None, "env": [{"id": "e"}]}
    assert flatten(tree) == [("z", None), ("a.x", 1), ("a.deep.y", [1, 2]), ("env.0.id", "e")]


def test_a_value_takes_the_source_of_the_table_around_it(tmp_path):
    (tmp_path / "run.toml").write_text("[a.b]\nc = 1\nd = 2\n")
    (tmp_path / "sources.json").write_text('{"a": "base.toml", "a.b.d": "--a.b.d"}')
    assert [(s.key, s.source) for s in read_settings(tmp_path)] == [("a.b.c", "base.toml"), ("a.b.d", "--a.b.d")]
    (tmp_path / "sources.json").write_text("[1]")
    assert [s.source for s in read_settings(tmp_path)] == ["", ""]
