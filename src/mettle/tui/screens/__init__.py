"""The screens, one file each: what is saved here, a run, a rollout, a task, a comparison, help."""
