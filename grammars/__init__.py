"""Constraints: a specification is compiled to a matcher that says which tokens may come next."""
