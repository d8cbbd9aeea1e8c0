"""The command line: `mettle NOUN VERB`, one file a noun.

Parts: `main` (the entry point, the list of nouns, how an error becomes an exit code), `groups` (nouns that are imported
when they are asked for, and near misses), `terminal` (what is printed). Invariant: importing this package and asking
for help imports nothing but click; whatever is heavy is imported inside a command.

Exit codes: 0 done, 1 a check failed or the program did, 2 a person has to act (wrong input, a full disk), 3 Mettle
cannot go on (a service is gone), 130 stopped by Ctrl-C.
"""
