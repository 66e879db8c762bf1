"""Weights: looking at an engine's weights, replacing them, receiving them from a trainer."""
