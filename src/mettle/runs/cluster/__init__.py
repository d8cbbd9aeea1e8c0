"""A run on the nodes of a Ray cluster: what it needs of them, who places it there, and what runs on each."""
