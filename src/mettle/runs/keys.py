"""The secrets of a run: made once, kept in its directory for its own user, handed to its processes by environment.

They outlive the processes, so that whoever may read the directory can talk to the run's server, also after a resume.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from mettle.errors import StorageError
from mettle.storage.files import write_json
from mettle.storage.run_dir import RunDir
from mettle.web.keys import Keys


def run_keys(run_dir: RunDir) -> Keys:
    """The keys of a run; a run that has none yet gets them. Raises: StorageError for a file that is none."""
    try:
        found = json.loads(run_dir.keys.read_text())
        keys = Keys(str(found["api"]), str(found["admin"]))
    except FileNotFoundError:
        keys = Keys.new()
        write_json(run_dir.keys, asdict(keys))
        run_dir.keys.chmod(0o600)
        return keys
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{run_dir.keys} cannot be read: {error}; remove it, and resume makes new keys") from error
    if not (keys.api and keys.admin):
        raise StorageError(f"{run_dir.keys} holds an empty key; remove it, and resume makes new keys")
    return keys
