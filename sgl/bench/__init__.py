"""Measurements that ship with the package. Each module measures one thing and returns a value; the CLI prints it."""
