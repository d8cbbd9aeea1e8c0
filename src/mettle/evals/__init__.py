"""Rollouts of a policy on tasks: what is run, what is kept on disk, what came of it."""
