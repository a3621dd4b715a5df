"""Adding a kernel: another way to compute an op, chosen where it can run.

Models do not know how an op is computed. They ask a table once, at load: op name -> implementations, each with a
priority and a condition. This script adds one for `silu_mul` (`silu(gate) * up`, in every layer of a Llama), measures
its error, and runs a model with it. It needs torch, and a tiny model with random weights.
"""

import torch

import sgl
from sgl.bench.stepped import SteppedEngine
from sgl.kernels import registry
from sgl.kernels.registry import OpFacts

# ## The table
#
# Every op has an entry `torch`: the reference, with priority 0, which runs everywhere. The others are in
# `kernels/references.py`, each with the reason why it does not run here, if it does not.

for implementation in registry.implementations("silu_mul"):
    print(f"{implementation.name:8} priority {implementation.priority:3}", implementation.supports(OpFacts()) or "runs")

# ## A kernel
#
# The shapes are in the name's suffix: T tokens, N features. This one computes `gate / (1 + exp(-gate)) * up` in one
# buffer. Every row is computed from that row alone, as a step holds rows of many sequences: that is the one rule which
# no kernel may break.


def one_buffer(gate_TN, up_TN):
    """`silu(gate) * up` with a single temporary."""
    out_TN = torch.exp(-gate_TN).add_(1.0)
    torch.div(gate_TN, out_TN, out=out_TN)
    return out_TN.mul_(up_TN)


# ## Its condition
#
# `supports` gets the facts of an engine (device, dtype, head sizes, deterministic mode) and returns `None`, or the
# reason why not. `sgl doctor` prints that reason, so it is a sentence.


def supports(facts):
    """Where `one_buffer` may run."""
    if facts.device != "cpu" or facts.dtype != "float32":
        return "written for float32 on the CPU"
    return "its sums are not checked bit by bit" if facts.deterministic else None


# ## Its test
#
# The oracle is never another kernel of ours: the reference is compared with float64, and a kernel with both. Inputs
# include what hurts: large numbers of both signs, zeros, a row of its own.

generator = torch.Generator().manual_seed(0)
gate = torch.randn(5, 64, generator=generator) * 20
up = torch.randn(5, 64, generator=generator)
gate[0] = 0.0

exact = (gate.double() / (1 + torch.exp(-gate.double()))) * up.double()
reference = registry.get("silu_mul", name="torch")(gate, up)
error = float((one_buffer(gate, up) - exact).abs().max())
print(f"largest error: {error:.1e}, of the reference {float((reference - exact).abs().max()):.1e}")
assert error < 1e-4
assert torch.equal(one_buffer(gate, up)[3:4], one_buffer(gate[3:4], up[3:4]))  # a row alone is the same bits

# ## In a model
#
# An engine's model runs in a worker process, which reads `kernels/references.py`; there the registration is one line.
# Here an engine core in this process shows it. The tokens before and after have to be equal.


@sgl.function
def hello(s):
    s += "Hello" + sgl.gen("more", max_tokens=8, ignore_eos=True, temperature=0)


def tokens():
    """Greedy tokens of the `dummy` model, with the kernels that are in the table now."""
    with SteppedEngine(model_path="dummy", num_threads=1, max_total_tokens=256, kernels="torch") as engine:
        return hello.run(backend=engine).get_meta_info("more")["output_ids"]


before = tokens()
calls = []


@registry.register("silu_mul", "one_buffer", priority=5, supports=supports)
def counted(gate_TN, up_TN):
    """`one_buffer`, which also counts."""
    calls.append(gate_TN.shape[0])
    return one_buffer(gate_TN, up_TN)


after = tokens()
print("calls:", len(calls), "rows of the first:", calls[0], "tokens equal:", before == after)
assert calls
assert before == after
assert registry.get("silu_mul", OpFacts(deterministic=True)) is not counted

# To keep it: the function in a module of `kernels/`, the line in `kernels/references.py`, the test above in
# `tests/kernels/`, and a line in `kernels/README.md`. A kernel that is there for speed comes with a measurement of
# before and after from one run. Native CPU kernels and Triton's are in `kernels/native/` and `kernels/triton/`.
