"""Weights: where a model lies (`sources`), how its files are read (`gguf_reader`), what it is (`checkpoint`)."""
