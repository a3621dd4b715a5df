"""Reading the engine: a request's life, room by room, with what each room makes of it.

The repository has four rooms: `lang/` (programs), `grammars/` (constraints), `runtime/` (the engine), `kernels/`
(numerics), and `sgl/`, which joins them to the outside. This script takes one program through all of them in this
process, step by step, and prints what is there at each door. Read it with the named files beside it: a test checks that
every file and every name in backticks exists.
"""

import sgl
from sgl.kernels import registry
from sgl.lang.graph import ProgramOptions, decode, encode
from sgl.runtime.config import EngineConfig
from sgl.runtime.core import EngineCore
from sgl.runtime.engine_start import build_core

# ## 1. A body becomes nodes: `lang/`
#
# `lang/decorator.py` makes an `SglFunction` of the function (`lang/function.py`). Its body runs as plain Python; `s +=`
# goes through `lang/state.py` to `lang/branches.py`, where `BranchState.append` turns expressions (`lang/expr.py`) into
# nodes of the request graph (`lang/graph.py`): `Text`, `Role`, `Gen`, `Select`, `Fork`, `Join` and a few more. What is
# appended between two reads is one fragment; `lang/interpreter.py` sends it to the backend. `lang/tracing.py` does the
# same without a backend, which is what we look at.


@sgl.function
def program(s):
    s += "Pick one: "
    branches = s.fork(2)
    branches[0] += "red or" + sgl.gen("left", max_tokens=3, ignore_eos=True, temperature=0)
    branches[1] += "a digit " + sgl.gen("right", regex="[0-9]{2}", temperature=0)
    branches.join()


trace = program.trace()
print(trace)

# Nodes carry resolved values only (`lang/sampling.py` has the defaults), and the line that made them. The graph is
# data: `encode` is what travels to the worker process, `to_json` what travels over HTTP.

graph = program.compile().bind()
wire = encode(graph)
print(len(graph.nodes), "nodes,", len(wire), "bytes")
assert decode(wire) == graph

# ## 2. From the client to the worker: `runtime/`
#
# `sgl.Engine` (`runtime/engine.py`) is the client half and imports no torch. `runtime/client.py` starts the worker and
# talks to it in the messages of `runtime/messages.py`. In the worker, `runtime/worker.py` reads them and drives an
# `EngineCore` (`runtime/core.py`), a plain object with `open`, `submit`, `cancel` and `step`. Here we build the core in
# this process, as the worker does (`runtime/engine_start.py`; what nobody decided, `runtime/resolution.py` does), on a
# tiny model with random weights. The runner is wrapped, to see each step's plan.

plans = []


class Watched:
    """A runner that keeps what it was asked to compute."""

    def __init__(self, runner):
        self.runner = runner

    def forward(self, plan, drawn=None):
        """The plan's logits."""
        plans.append(plan)
        return self.runner.forward(plan, drawn)


class WatchedCore(EngineCore):
    """A core whose steps can be read."""

    def __init__(self, config, tokenizer, runner, sampler, **services):
        super().__init__(config, tokenizer, Watched(runner), sampler, **services)


events = []
config = EngineConfig(model_path="dummy", num_threads=1, max_total_tokens=256, disable_overlap_schedule=True)
core, info = build_core(config, emit=lambda number, event: events.append(event), kind=WatchedCore)
print("model:", info["model"], "page size:", core.config.page_size)

# ## 3. A graph becomes requests: `ProgramRun`
#
# `runtime/program_run.py` holds a program while it runs. It advances each branch node by node: text is rendered and
# encoded (`runtime/text/`, with the model's chat template and tokenizer), a generation or select becomes a `Request` on
# a `Sequence` (`runtime/sequence.py`), a fork makes sequences that share pages. A constraint is compiled by
# `GrammarCompiler` (`grammars/compiler.py`), off the step loop.

core.open(1, ProgramOptions(name="program"))
core.submit(1, graph, finish=True)
print("waiting or running:", core.scheduler.has_work)

# ## 4. The step
#
# A step is four calls: schedule, forward, sample, process.
#
# * `Scheduler.schedule` (`runtime/scheduler.py`) decides who advances by how many tokens. It finds known prefixes in
#   the radix tree (`runtime/radix.py`), takes pages from the pool (`runtime/pool.py`, `runtime/paging.py`), and evicts
#   what will be used last (`runtime/eviction.py`). The result is a `StepPlan` (`runtime/plan.py`), a value.
# * `ModelRunner.forward` (`runtime/model_runner.py`) computes it: the layers of `runtime/models/decoder.py`, over ops
#   that come from `kernels/registry.py`.
# * `Sampler` (`runtime/sampler.py`) masks what a constraint does not allow (`runtime/masks.py` fills bitmasks from the
#   matchers of `grammars/matcher.py`) and draws.
# * `Scheduler.process` appends tokens, ends what has ended, and tells the programs, which go on.

while core.step():
    chunks = plans[-1].chunks
    print(
        f"step {len(plans)}:",
        ", ".join(
            f"sequence {chunk.sequence} computes {len(chunk.token_ids)} at {chunk.start}"
            + (" and draws" if chunk.sample else "")
            for chunk in chunks
        ),
    )

# The beginning "Pick one: " was computed by one of the two branches, in the first step; the other found its pages. That
# is sharing: no copy, two page tables that name the same pages.

computed = sum(plan.num_tokens for plan in plans)
print("tokens computed:", computed, "steps:", len(plans))
assert len(plans) >= 3

# ## 5. What comes back
#
# Events (`lang/events.py`: `ValueEvent`, `JoinedEvent`, `DoneEvent`, ...) go to the client, where `lang/interpreter.py`
# gives values to whoever reads them, and `lang/streams.py` makes the one stream of them.

for event in events:
    print(type(event).__name__, repr(getattr(event, "value", "")))
usage = events[-1].usage
print("prompt:", usage.prompt_tokens, "found:", usage.cached_tokens, "computed:", usage.prefill_tokens)
assert usage.prompt_tokens == usage.cached_tokens + usage.prefill_tokens
assert usage.cached_tokens > 0

# ## 6. The laws
#
# What is free, cached and held is all there is; after the last program nothing is held. `Stats.check`
# (`runtime/stats.py`) says so, after every test of the suite.

stats = core.snapshot()
stats.check()
print("pages:", stats.pages_total, "free:", stats.pages_free, "cached:", stats.pages_cached, "held:", stats.pages_held)
assert stats.pages_held == 0

# ## 7. The other doors
#
# `sgl serve` is `sgl/server/`: `sgl/server/app.py` routes, `sgl/server/call.py` is one request of a client, and each
# route makes a graph and submits it to the same engine. `sgl/cli/` has the commands, `sgl/bench/` what is measured.
# Where the kernels of a model come from is one table:

for choice in registry.explain(registry.OpFacts())[:3]:
    print(choice.op, "->", choice.chosen)

core.compiler.close()
