"""`mettle`: the entry point, the nouns, and how everything ends.

Whatever a command raises becomes one line on standard error and an exit code here, and nowhere else.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import click

from mettle import __version__
from mettle.cli.groups import Lazy, LazyGroup
from mettle.cli.terminal import take_how_to_go_on
from mettle.errors import MettleError

EXIT_FAILED = 1
EXIT_USER = 2
EXIT_STOPPED = 130
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

NOUNS = {
    "quickstart": Lazy("mettle.cli.quickstart:quickstart", "Watch a small model learn a task, on this machine, now."),
    "lab": Lazy("mettle.cli.lab:lab", "Make a workspace: configs, an environment, notes for coding agents."),
    "rl": Lazy("mettle.cli.rl:rl", "Train a model with reinforcement learning: run, resume, watch, stop."),
    "eval": Lazy("mettle.cli.eval:evaluations", "Measure a model on an environment, and look at the results."),
    "env": Lazy("mettle.cli.env:env", "Make, list, install and check environments."),
    "sft": Lazy("mettle.cli.sft:sft", "Fine-tune a model on a file of chats, or of prompts and completions."),
    "dpo": Lazy("mettle.cli.dpo:dpo", "Tune a model on a file of preferences: DPO and its relatives."),
    "adapter": Lazy("mettle.cli.adapter:adapter", "List, take out and merge the adapters that runs have trained."),
    "data": Lazy("mettle.cli.data:data", "Look at a dataset; make training data of rollouts."),
    "gepa": Lazy("mettle.cli.gepa:gepa", "Optimise a system prompt by reflection on scored rollouts."),
    "inference": Lazy("mettle.cli.inference:inference", "Serve a model, or talk to one."),
    "train": Lazy("mettle.cli.train:train", "Serve a base model to programs that train adapters on it."),
    "sandbox": Lazy("mettle.cli.sandbox:sandbox", "Run untrusted code: machines to work in, here or at a service."),
    "hub": Lazy("mettle.cli.hub:hub", "Serve a lab: accounts, environments, runs and evaluations."),
    "secret": Lazy("mettle.cli.secret:secret", "Set the secrets and variables that hosted jobs are told."),
    "usage": Lazy("mettle.cli.usage:usage", "Show the tokens that hosted jobs took."),
    "login": Lazy("mettle.cli.account:login", "Sign in at a Hub."),
    "logout": Lazy("mettle.cli.account:logout", "Forget the token of the Hub in use."),
    "whoami": Lazy("mettle.cli.account:whoami", "Say who one is at the Hub in use."),
    "teams": Lazy("mettle.cli.account:teams", "List one's teams at the Hub in use."),
    "switch": Lazy("mettle.cli.account:switch", "Act as a team, or as oneself."),
    "config": Lazy("mettle.cli.config:config", "Show what a config resolves to, and why; choose between Hubs."),
    "doctor": Lazy("mettle.cli.doctor:doctor", "Check that this machine has what Mettle needs."),
}
ELSEWHERE = {
    "trainer": "mettle rl start RUN trainer",
    "orchestrator": "mettle rl start RUN orchestrator",
    "serve": "mettle inference serve",
    "chat": "mettle inference chat",
    "plan": "mettle rl plan",
    "simulate": "mettle rl simulate",
    "logs": "mettle rl logs",
}
"""What those type who come from other trainers."""


@click.group(
    cls=LazyGroup,
    lazy=NOUNS,
    elsewhere=ELSEWHERE,
    name="mettle",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Start with `mettle quickstart`. Every command explains itself with --help.",
)
@click.version_option(__version__, prog_name="mettle")
def cli() -> None:
    """A lab for training language models with reinforcement learning, on your own machines."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    stdout = sys.stdout
    try:
        result = cli.main(
            args=None if arguments is None else list(arguments), prog_name="mettle", standalone_mode=False
        )
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as error:
        return _say_usage(error)
    except (click.Abort, KeyboardInterrupt):
        # Had it come within an `exec` of text, as one makes a dataclass, Python would end by SIGINT and not with 130.
        exec("")
        how = take_how_to_go_on()
        _say("stopped" + (f"; {how}" if how else ""))
        return EXIT_STOPPED
    except (BrokenPipeError, SystemExit) as end:
        # The reader has seen enough, as in `mettle rl list | head`; click replaces sys.stdout then, and exits with 1.
        if isinstance(end, SystemExit) and sys.stdout is stdout:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
        return 0
    except MettleError as error:
        return _say_error(error)
    except ModuleNotFoundError as error:
        return _say_missing(error)
    except OSError as error:
        return _say_refused(error, stdout)
    except Exception as error:
        return _say_crash(error)


def _say(text: str) -> None:
    click.echo(" ".join(text.split()), err=True)


def _say_usage(error: click.ClickException) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":  # `mettle` or `mettle rl`: the help is the answer
        click.echo(error.format_message())
        return EXIT_USER
    context = getattr(error, "ctx", None)
    hint = f"; see `{context.command_path} --help`" if context is not None else ""
    _say(f"error: {error.format_message().rstrip('.')}{hint}")
    return EXIT_USER if isinstance(error, click.UsageError) else error.exit_code


def _say_error(error: MettleError) -> int:
    if os.environ.get("METTLE_DEBUG"):
        _print_traceback(error)
    _say(f"error: {error}")
    return error.exit_code


def _say_missing(error: ModuleNotFoundError) -> int:
    """A package of an extra that is not installed is the person's to bring; any other is a mistake."""
    from mettle.extras import extra_of, install_line

    extra = extra_of(error.name or "")
    if extra is None:
        return _say_crash(error)
    if os.environ.get("METTLE_DEBUG"):
        _print_traceback(error)
    _say(f"error: this needs {error.name}, which is not installed: {install_line(extra)}")
    return EXIT_USER


def _say_refused(error: OSError, stdout: TextIO) -> int:
    """What the system refused of a file, or of the output, is no mistake in Mettle; other refusals have no name."""
    is_output = error.filename is None and error.errno in _NO_ROOM
    if "temporary directory" in str(error):
        _say(
            f"error: no file can be written in any folder for temporary files ({error.strerror}): look at"
            " `ulimit -f`, `df`, and TMPDIR"
        )
        return EXIT_USER
    if error.filename is None and not is_output:
        return _say_crash(error)
    if os.environ.get("METTLE_DEBUG"):
        _print_traceback(error)
    if is_output:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())  # what is still buffered has nowhere to go
    _say(f"error: {'cannot write the output' if is_output else error.filename}: {error.strerror}")
    return EXIT_USER


def _say_crash(error: Exception) -> int:
    first = str(error).strip().splitlines()
    what = f"{type(error).__name__}: {first[0]}" if first else type(error).__name__
    if os.environ.get("METTLE_DEBUG"):
        _print_traceback(error)
        _say(f"error: {what}")
        return EXIT_FAILED
    kept = _write_traceback(error)
    where = f"traceback in {kept}" if kept else "its traceback cannot be written anywhere; METTLE_DEBUG=1 prints it"
    _say(f"error: {what} (a mistake in Mettle or in an environment; {where})")
    return EXIT_FAILED


def _print_traceback(error: BaseException) -> None:
    import traceback

    traceback.print_exception(error)


def _write_traceback(error: Exception) -> Path | None:
    """Keep the traceback in the user's state directory, or in a temporary file where that cannot be written, if any."""
    import platform
    import tempfile
    import time
    import traceback

    text = f"mettle {__version__}, Python {platform.python_version()}\n{' '.join(sys.argv)}\n\n"
    text += "".join(traceback.format_exception(error))
    name = time.strftime("crash-%Y%m%d-%H%M%S.txt")
    try:
        folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "mettle"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / name
        path.write_text(text, encoding="utf-8")
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory
        try:
            path = Path(tempfile.mkdtemp(prefix="mettle-")) / name
            path.write_text(text, encoding="utf-8")
        except OSError:
            return None
    return path


if __name__ == "__main__":
    main()
