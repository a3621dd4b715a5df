"""The workloads of `sgl bench program`: 17 open benchmarks of frontend programs, rebuilt from seeds.

Owns the programs and the shapes of their calls; executes nothing. The shapes (number of instances, tree, lengths) are
those of the programs under `benchmark/` of sgl-project/sglang with their defaults; the material is drawn at random, so
that nothing has to be fetched and the sharing tree is exact. Each builder's docstring says which text is random and
which real, the shape, the size at scale 1.0, and where it departs from its source.

Conventions of the shapes: P is text that all instances share, G one that a group shares, U one of an instance alone;
numbers are tokens. Lengths of outputs are forced (`ignore_eos`) unless a grammar or a stop string is the point.
Generations are greedy, or carry seeds of their own where branches have to differ: the same call gives the same tokens
in whatever form it is sent. Texts may end inside a word.

The calls of one wave are independent and may run together; a wave starts when the one before it has ended. The same
calls as plain requests are what `sgl.bench.plain.PlainBackend` makes of the same programs.
"""

from __future__ import annotations

from sgl.bench.workloads.base import WORKLOADS, Call, Workload, named
from sgl.bench.workloads.draw import Unit

# Imported for what they register, in the order of the table.
from sgl.bench.workloads import questions, agents, documents  # isort: skip  # noqa: F401
from sgl.bench.workloads.questions import NO_REUSE

__all__ = ["NO_REUSE", "WORKLOADS", "Call", "Unit", "Workload", "named"]
