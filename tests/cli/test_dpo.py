"""`mettle dpo`: what does not fit is one line and exit code 2."""

import json

import pytest
from click.testing import CliRunner

from mettle.cli.main import cli
from mettle.errors import UserError


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--loss", "rlhf"], "'rlhf' is not one of"),
        (["--loss", "kto", "--margin", "1"], "--margin 1 is no option of kto"),
        (["--desirable", "2"], "--desirable 2 is no option of dpo"),
        (["--beta", "0"], "0.0 is not in the range x>0"),
        (["--label-smoothing", "0.5"], "0.5 is not in the range"),
        (["--loss", "ipo", "--label-smoothing", "0.1"], "--label-smoothing 0.1 is no option of ipo"),
        (["--model", "nowhere"], "nowhere"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    given = ["dpo", "run", "pairs.jsonl", "--model", "model", "--to", "out", *arguments]
    done = CliRunner().invoke(cli, given)
    assert done.exit_code == 2 or isinstance(done.exception, UserError), done.output
    assert words in done.output + str(done.exception)
    assert not (tmp_path / "out").exists()
