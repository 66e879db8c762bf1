"""llmpy inside other programs that have interfaces for engines."""
