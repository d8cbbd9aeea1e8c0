"""Running an environment over many rows: what is run, what is kept on disk, what came of it."""
