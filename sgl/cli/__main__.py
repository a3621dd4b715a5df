"""`python -m sgl.cli`, the same as the `sgl` command."""

from sgl.cli import main

main()
