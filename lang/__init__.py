"""The language: primitives, program state, the request graph and the interpreter that builds it."""
