"""Evaluations that people start at the Hub: checked, queued, run by this machine, kept among the pushed ones."""
