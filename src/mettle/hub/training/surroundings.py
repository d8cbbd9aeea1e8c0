"""What the process of a job inherits from the one that starts it, on the Hub's machine as on one that has joined."""

from __future__ import annotations

import os
import re

_OF_THE_OPERATOR = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|METTLE_HUB_URL")


def own_environment() -> dict[str, str]:
    """This process's environment without what opens something."""
    return {name: value for name, value in os.environ.items() if not _OF_THE_OPERATOR.search(name)}
