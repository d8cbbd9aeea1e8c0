"""`python -m mettle.cli` is `mettle`."""

from mettle.cli.main import main

main()
