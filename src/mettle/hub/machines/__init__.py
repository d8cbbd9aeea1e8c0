"""Machines that have joined the Hub: let in, given work under leases, shown, and let go."""
