"""The registry: environments as packages with immutable versions, and the index that pip reads."""
