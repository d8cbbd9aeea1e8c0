"""Lines of a log are entries, and a long log is cut."""

from hypothesis import given
from hypothesis import strategies as st

from mettle.hub.logs import parse_line, read_tail


@given(st.text(max_size=60))
def test_any_log_line_is_an_entry(line):
    entry = parse_line(line)
    assert set(entry) == {"time", "level", "logger", "message", "extra", "traceback"}


def test_a_long_log_is_cut_at_a_line(tmp_path):
    (tmp_path / "a.log").write_text("".join(f"line {i} {'x' * 100}\n" for i in range(9000)))
    entries, is_cut = read_tail(tmp_path, "a.log", max_lines=10_000)
    assert is_cut
    assert entries[0]["message"].startswith("line ")
    assert entries[-1]["message"].startswith("line 8999")
