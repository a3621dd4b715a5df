"""Pages to look at: a run as a tree of prompts (`run`), a plan before it (`plan`).

Owns HTML that needs nothing from elsewhere: one file, styles inside, no script and no address. Everything that comes
from a program or a model goes through `page.escape`.
"""
