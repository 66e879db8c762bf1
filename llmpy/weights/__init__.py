"""Weights: inspects an engine's weights, replaces them, receives them from a trainer."""
