"""Who uses a Hub: people, teams, tokens, sessions, one-time links, and the log of what was done."""
