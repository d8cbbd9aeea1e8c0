"""`python -m mettle.sandbox.service CONFIG_JSON`: one service in a process of its own."""

import sys

from mettle.sandbox.service.server import main

sys.exit(main(sys.argv[1:]))
