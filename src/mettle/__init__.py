"""Mettle: an open, self-hosted lab for training language models with reinforcement learning."""

__version__ = "0.1.0"
