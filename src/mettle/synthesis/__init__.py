"""Training data from rollouts: run them, or take an evaluation's; keep the good ones; write chats with their origin."""
