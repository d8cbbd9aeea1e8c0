"""What the tests of whole runs share is in `stories`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for `stories`; pytest's importlib mode leaves sys.path alone
