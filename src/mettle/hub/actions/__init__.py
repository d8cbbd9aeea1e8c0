"""What a Hub does by itself after a push: installs the release in a sandbox, loads it, makes its quality card."""
