"""Numerics: one registry; per op a torch reference and the implementations that replace it where they win."""
