"""What a rollout is worth: reward functions, their weights, and how their arguments are found."""
