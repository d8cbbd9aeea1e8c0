"""Rewards tried on answers made from the data, without a model."""
