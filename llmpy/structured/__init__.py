"""Structured outputs: what a request's text must be, in the words of llguidance."""
