"""Numerics for the CPU in C++, compiled on the user's machine; see README.md of `kernels`. Imports no torch."""
