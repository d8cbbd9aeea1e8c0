"""Vocabulary, conversation, wording, config and figures by step: the parts by themselves."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from mettle.hub import filters
from mettle.hub.conversation import shown_messages, text_of
from mettle.hub.logs import parse_line, read_tail
from mettle.hub.metrics import MetricTable
from mettle.hub.models import RolloutDetail, ShownRollout, TokenColumns, TurnDetail
from mettle.hub.provenance import flatten, read_settings
from mettle.hub.vocabulary import Vocabulary, load_vocabulary
from mettle.storage.ledger import Ledger


def vocabulary_of(document):
    return Vocabulary(Tokenizer.from_str(json.dumps(document)))


def test_a_character_over_several_tokens_is_shown_where_it_is_complete(byte_tokenizer):
    vocabulary = vocabulary_of(byte_tokenizer)
    ids = [*"a\u20ac\n".encode(), 258]
    assert vocabulary.texts(ids) == ["a", "\\xe2", "\\x82", "\u20ac", "\n", "<|system|>"]
    assert vocabulary.text(ids) == "a\u20ac\n<|system|>"


def test_a_broken_character_does_not_spoil_what_follows(byte_tokenizer):
    vocabulary = vocabulary_of(byte_tokenizer)
    assert vocabulary.texts([0xE2, 0x82, 257, *b"ok"]) == ["\\xe2", "\\x82", "<|end|>", "o", "k"]
    assert vocabulary.texts([0xE2, ord("o")])[0] == "\\xe2"


@given(ids=st.lists(st.integers(-5, 300), max_size=40))
def test_any_ids_give_as_many_texts(ids, byte_tokenizer):
    vocabulary = vocabulary_of(byte_tokenizer)
    texts = vocabulary.texts(ids)
    assert len(texts) == len(ids)
    assert all(texts)
    json.dumps(texts).encode()
    vocabulary.text(ids).encode()


@given(text=st.text(max_size=30))
def test_text_through_bytes_comes_back(text, byte_tokenizer):
    assert vocabulary_of(byte_tokenizer).text(text.encode()) == text


def test_other_kinds_of_tokenizer_are_read():
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("\u2581hi", -1.0)], unk_id=0))
    unigram.decoder = decoders.Metaspace()
    assert Vocabulary(unigram).texts([1]) == [" hi"]
    llama = Tokenizer(models.BPE(vocab={"\u2581a": 0, "<0x0A>": 1}, merges=[], byte_fallback=True))
    llama.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    assert Vocabulary(llama).texts([0, 1]) == [" a", "\n"]
    merged = Tokenizer(models.BPE(vocab={"\u0120the": 0}, merges=[]))
    merged.decoder = decoders.ByteLevel()
    assert Vocabulary(merged).texts([0]) == [" the"]


def test_the_tokenizers_library_agrees(byte_tokenizer, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_tokenizer))
    library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "na\u00efve \u20ac <b>\n"
    ids = library.encode(text).ids
    assert load_vocabulary(tmp_path).text(ids) == text == library.decode(ids)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": {}}', '{"model": {"vocab": {"a": "x"}}}'])
def test_a_tokenizer_that_cannot_be_read_is_none(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    assert load_vocabulary(tmp_path) is None
    assert load_vocabulary(tmp_path / "missing") is None


def detail(roles, num_turns):
    turns = [
        TurnDetail(
            prefix_length=0, num_prompt_tokens=1, temperature=1.0, prompt_text="", tokens=TokenColumns(
                ids=[i], texts=[f"turn-{i}"], logprobs=[-0.1], versions=[0])
        ) for i in range(num_turns)
    ]  # fmt: skip
    row = ShownRollout.model_construct(rollout_id="r")
    messages = [{"role": role, "content": f"m{i}"} for i, role in enumerate(roles)]
    return RolloutDetail.model_construct(
        row=row, messages=messages, turns=turns, answer="", siblings=[], is_decoded=True
    )


def test_turns_belong_to_the_last_assistant_messages():
    shown = shown_messages(detail(["user", "assistant", "user", "assistant", "tool", "assistant"], 2))
    assert [m.turn.tokens.texts[0] if m.turn else None for m in shown] == [None, None, None, "turn-0", None, "turn-1"]


def test_turns_without_a_message_are_shown_after_the_rest():
    shown = shown_messages(detail(["user", "assistant"], 3))
    assert [(m.role, m.turn.tokens.texts[0] if m.turn else None) for m in shown] == [
        ("user", None), ("assistant", "turn-2"), ("sampled", "turn-0"), ("sampled", "turn-1"),
    ]  # fmt: skip


def test_contents_of_every_shape_are_text():
    assert text_of(None) == ""
    assert text_of([{"type": "text", "text": "a"}, {"type": "image_url"}, "b"]) == "a\n[image_url]\nb"
    assert text_of({"x": 1}) == '{"x": 1}'


@pytest.mark.parametrize(
    ("value", "words"),
    [(1.8e-7, "2e-7"), (2e-7, "2e-7"), (9.5e-8, "1e-7"), (0.0, "the last bit"), (None, filters.DASH)],
)
def test_a_bound_is_never_below_the_value(value, words):
    assert filters.bound(value) == words


@given(st.floats(1e-12, 1e3))
def test_bounds_hold(value):
    assert float(filters.bound(value)) >= value * (1 - 1e-9)


def test_heat_grows_as_probability_falls():
    shades = [filters.heat(lp) for lp in (0.0, -0.2, -0.5, -1.0, -2.0, -4.0, -9.0, float("-inf"))]
    assert shades == [0, 1, 2, 3, 4, 5, 6, 6]
    assert filters.probability(float("-inf")) == "0%"


def test_metrics_follow_new_steps_and_names(tmp_path):
    ledger = Ledger(tmp_path / "run.db")
    table = MetricTable(ledger.database)
    table.refresh()
    assert table.names == []
    ledger.journal.record_metrics(1, {"b": 1.0, "a": 2.0})
    table.refresh()
    ledger.journal.record_metrics(2, {"b": 3.0, "c": 4.0})
    ledger.journal.record_metrics(1, {"b": 1.5})
    table.refresh()
    assert table.columns == {"a": {1: 2.0}, "b": {1: 1.5, 2: 3.0}, "c": {2: 4.0}}
    assert table.newest(("missing", "b")) == 3.0
    ledger.close()


def test_a_config_is_flattened_values_first():
    tree = {"a": {"x": 1, "deep": {"y": [1, 2]}}, "z": None, "env": [{"id": "e"}]}
    assert flatten(tree) == [("z", None), ("a.x", 1), ("a.deep.y", [1, 2]), ("env.0.id", "e")]


def test_a_value_takes_the_source_of_the_table_around_it(tmp_path):
    (tmp_path / "run.toml").write_text("[a.b]\nc = 1\nd = 2\n")
    (tmp_path / "sources.json").write_text('{"a": "base.toml", "a.b.d": "--a.b.d"}')
    assert [(s.key, s.source) for s in read_settings(tmp_path)] == [("a.b.c", "base.toml"), ("a.b.d", "--a.b.d")]
    (tmp_path / "sources.json").write_text("[1]")
    assert [s.source for s in read_settings(tmp_path)] == ["", ""]


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
