"""Training runs that people submit: checked, queued, run by this machine, one after the other."""
