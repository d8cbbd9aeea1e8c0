"""Runs: a training run as processes on one machine.

Parts: `config` (the whole run's config), `create` (a run directory from it), `process` and `supervisor` (starting,
watching, restarting, stopping), `watchdog` (who waits for whom, and what to do about a stall), `progress` and
`summary` (what a person sees), `launch` (run, resume, stop, list) and `quickstart` (the main job). Invariant: the
supervisor holds no state of the run that is not on disk, so killing it loses nothing.
"""
