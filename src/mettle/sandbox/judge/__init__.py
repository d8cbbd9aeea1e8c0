"""Code against tests, in milliseconds: a verdict for each.

    pool.py         warm cells, slots, retries; `probe`, a look at the host without a pool
    judgement.py    one solution: built, run on its tests, checked; dialogues.py, against a program that talks to it
    orders.py, limits.py, reports.py   a caller's tests into orders, a cell's reports into verdicts
    verdicts.py, comparators.py   tests, results, and when an output is the expected one
    checkers.py, checking.py      where a task's own code decides, in a cell of its own
    builds.py, versions.py        compilers, and what languages this host has; calls.py, functions in other languages
    cells.py        the owner's end of one cell; memory.py, judgements that are remembered

The other end is `zygote/cell.py`.
"""
