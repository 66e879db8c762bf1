"""Structured outputs: converts a request's constraint on its text to a grammar of llguidance."""
