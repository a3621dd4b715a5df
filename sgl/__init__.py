"""sgl: structured generation that starts from the language."""

__version__ = "0.1.0"
