"""Kernels for GPUs, in Triton. Loaded when an engine runs on CUDA, or under Triton's interpreter in tests."""
