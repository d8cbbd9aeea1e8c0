"""What a signature covers, and what a key file holds."""

from pathlib import Path

import pytest

from mettle.errors import UserError
from mettle.inference.outside.signatures import SIGNATURE_HEADER, WorkerKey, check_signature, signed_bytes

SAID = ("POST", "/work/v1/answer", "session", 7, b"{}")


def test_a_word_is_its_key_s_and_nothing_of_it_can_be_changed(tmp_path: Path) -> None:
    key = WorkerKey.of_file(tmp_path / "key")
    signature = key.headers(*SAID)[SIGNATURE_HEADER]
    assert check_signature(key.name, signature, signed_bytes(*SAID))
    others = [
        ("GET", *SAID[1:]), ("POST", "/work/v1/join", *SAID[2:]), (*SAID[:2], "other", *SAID[3:]),
        (*SAID[:3], 8, b"{}"), (*SAID[:4], b"{ }"),
    ]  # fmt: skip
    for other in others:
        assert not check_signature(key.name, signature, signed_bytes(*other))


def test_another_s_key_and_what_is_no_key_sign_nothing(tmp_path: Path) -> None:
    key, other = WorkerKey.of_file(tmp_path / "key"), WorkerKey.of_file(tmp_path / "other")
    signature = key.headers(*SAID)[SIGNATURE_HEADER]
    for name in (other.name, "", "zz", key.name[:-2], key.name + "00"):
        assert not check_signature(name, signature, signed_bytes(*SAID))
    for broken in ("", "zz", signature[:-2]):
        assert not check_signature(key.name, broken, signed_bytes(*SAID))


def test_a_key_is_made_once_and_nobody_else_reads_it(tmp_path: Path) -> None:
    first = WorkerKey.of_file(tmp_path / "key")
    assert WorkerKey.of_file(tmp_path / "key").name == first.name
    assert (tmp_path / "key").stat().st_mode & 0o077 == 0


def test_a_file_that_holds_no_key_is_named(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("seven\n")
    with pytest.raises(UserError, match="holds no key"):
        WorkerKey.of_file(tmp_path / "key")
