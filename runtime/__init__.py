"""The engine: executes request graphs on a model."""
