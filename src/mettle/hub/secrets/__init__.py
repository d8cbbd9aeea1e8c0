"""Secrets and variables of owners and environments: sealed in the database, told to jobs, hidden in their logs."""
