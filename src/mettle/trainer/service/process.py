"""The command `python -m mettle.trainer.service`: the service of a Hub, from its config file to its exit status.

It answers whoever has the keys that its environment holds, which is the Hub alone (`mettle.web.keys`). Exit status 0
after SIGTERM or SIGINT, 2 for a mistake in the config (one line). Invariant: without keys it does not start.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from mettle.errors import MettleError, UserError
from mettle.log import setup_logging
from mettle.storage.files import write_json
from mettle.trainer.service.config import TrainServeConfig
from mettle.web.bodies import first_fault
from mettle.web.keys import ADMIN_KEY_ENV, API_KEY_ENV, Keys


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = _arguments(argv)
    try:
        config = _read_config(arguments.config)
        keys = Keys.from_environment()
        if not keys.api or not keys.admin:
            raise UserError(f"this is the service of a Hub, which gives it {API_KEY_ENV} and {ADMIN_KEY_ENV}")
        setup_logging(level=config.log_level)
        # Before torch is imported: its thread pools read it once.
        os.environ.setdefault("OMP_NUM_THREADS", str(config.num_threads))
        from mettle.trainer.service.server import serve

        def tell(address: str) -> None:
            write_json(arguments.ready_file, {"base_url": address, "pid": os.getpid()})

        asyncio.run(serve(config, tell, keys, is_for_others=arguments.for_others))
    except MettleError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


def _read_config(path: Path) -> TrainServeConfig:
    """The config in a JSON file. Raises: UserError naming the file and the field."""
    try:
        return TrainServeConfig.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        field, message = first_fault(error.errors())
        raise UserError(f"{path}: {field or 'the file'}: {message}") from error


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mettle.trainer.service", description="Serve a base model.")
    parser.add_argument("--config", type=Path, required=True, help="JSON file with the fields of TrainServeConfig")
    parser.add_argument("--ready-file", type=Path, required=True, help="written with the address once it answers")
    parser.add_argument("--for-others", action="store_true", help="the Hub's clients are not on this machine")
    return parser.parse_args(argv)
