"""Results: the parts of outputs, and conversions of outputs."""
