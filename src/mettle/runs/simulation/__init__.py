"""A whole run with its supervisor in simulated time: what freezes, dies or fills up here does so on a machine that is
not there. See `histories`."""
