"""Faults that a test can put into any Python process of a run, which has this folder on its path.

The files in `METTLE_TEST_FAULTS` say what is wrong now. SIGUSR1 keeps the main thread, and with it an event loop, for
as long as the file `blocked` is there, SIGUSR2 from its next transaction on; the host's clock is off by the seconds
that `clock` holds.
"""

import os
import signal
import time

FOLDER = os.environ.get("METTLE_TEST_FAULTS")
_time, _sleep = time.time, time.sleep


def stand_still(number: int, frame: object) -> None:
    """Hold the main thread."""
    while os.path.exists(f"{FOLDER}/blocked"):
        _sleep(0.05)


def stand_still_writing(number: int, frame: object) -> None:
    """Hold whoever begins the next transaction, in the middle of it."""
    from mettle.storage.database import Database

    begin = Database._begin

    def begin_and_stand_still(database: Database) -> None:
        begin(database)
        stand_still(number, None)

    Database._begin = begin_and_stand_still


def set_time() -> float:
    """What the host's clock says after somebody has set it."""
    try:
        with open(f"{FOLDER}/clock") as file:
            return _time() + float(file.read() or 0)
    except (OSError, ValueError):
        return _time()


if FOLDER:
    signal.signal(signal.SIGUSR1, stand_still)
    signal.signal(signal.SIGUSR2, stand_still_writing)
    time.time = set_time
