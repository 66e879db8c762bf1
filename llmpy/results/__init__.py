"""Results: what outputs are made of, and what can be made of outputs."""
