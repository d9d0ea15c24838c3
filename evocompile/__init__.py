"""evocompile: compile an unmodified PyTorch model for training on many devices at very long context."""
