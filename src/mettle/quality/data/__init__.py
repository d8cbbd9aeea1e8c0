"""A dataset looked at: what is in it, how its answers look, and which parser and reward suit them."""
