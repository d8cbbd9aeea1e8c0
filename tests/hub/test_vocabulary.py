"""Tokens are shown as text, whole characters where they are complete."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from mettle.hub.vocabulary import Vocabulary, load_vocabulary


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
