"""`mettle train`: mistakes are one line, and a key is one."""

from __future__ import annotations

import pytest

from mettle.cli import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--base-model"),
        (["--base-model", "nowhere"], "no config.json"),
        (["--base-model", "nowhere", "--max-rank", "0"], "max_rank"),
        (["--base-modl", "x"], "--base-model"),
    ],
)
def test_a_mistake_is_one_line(capsys, arguments, said):
    assert main.run(["train", "serve", *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_a_service_for_others_wants_keys(capsys, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    data = str(tmp_path / "data")
    assert main.run(["train", "serve", "--base-model", str(tmp_path), "--host", "0.0.0.0", "--data", data]) == 2
    assert "--keys" in capsys.readouterr().err


def test_a_key_is_a_line_of_a_file_of_keys(capsys, tmp_path):
    from mettle.trainer.service.access import TenantKeys

    assert main.run(["train", "key", "ann"]) == 0
    (tmp_path / "keys").write_text("# ours\n" + capsys.readouterr().out)
    key = (tmp_path / "keys").read_text().split()[2]
    assert TenantKeys.read(tmp_path / "keys").owner({"x-api-key": key}) == "ann"
    assert main.run(["train", "key", "ann b"]) == 2
