"""Starts a side's host in an interpreter of the peer's own, as `--peer-python` names it.

Run as a script by `sgl.bench.peers.process` and `sgl.bench.program_peers`. Owns one thing: it makes this copy of `sgl`
importable there without putting a folder on the path, so that none of our other packages mixes with the peer's. The
peer's environment must have msgspec.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys


def main(package: str, module_name: str, *arguments: str) -> None:
    """Call `main(*arguments)` of a module of `sgl`, with `sgl` from the folder `package`."""
    spec = importlib.util.spec_from_file_location("sgl", f"{package}/__init__.py", submodule_search_locations=[package])
    if spec is None or spec.loader is None:
        raise ImportError(f"no package in {package}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["sgl"] = module
    spec.loader.exec_module(module)
    importlib.import_module(module_name).main(*arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
