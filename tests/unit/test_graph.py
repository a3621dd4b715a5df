"""Passes over graphs: each on its own, and that they change nothing that a program says."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl.errors import InvalidProgram
from sgl.lang.graph import (
    Fork,
    Gen,
    Graph,
    Join,
    LiteralText,
    Mark,
    Release,
    Rewind,
    Role,
    Text,
    Var,
    decode,
    encode,
    from_json,
    to_json,
    validate,
)
from sgl.lang.passes import common_prefix, liveness, merge_text


def text(id: int, content: str, branch: int = 0) -> Text:
    return Text(id=id, branch=branch, segments=(LiteralText(content),))


def gen(id: int, name: str = "x", branch: int = 0) -> Gen:
    return Gen(id=id, branch=branch, name=name)


def test_merge_stops_at_other_nodes():
    graph = merge_text(Graph(nodes=(text(4, "a"), text(5, "b"), gen(6), text(7, "c"), text(8, "d"))))
    assert graph.nodes == (text(4, "ab"), gen(5), text(6, "cd"))


def test_merge_goes_over_nodes_of_other_branches():
    graph = merge_text(
        Graph(nodes=(Fork(id=0, children=(1, 2)), text(1, "a", 1), text(2, "b", 2), text(3, "c", 1), text(4, "d", 2)))
    )
    assert graph.nodes[1:] == (text(1, "ac", 1), text(2, "bd", 2))


def test_merge_keeps_what_waits_where_it_is():
    var = Text(id=2, branch=0, segments=(LiteralText("v="), Var("x", 1)))
    graph = merge_text(Graph(nodes=(Fork(id=0, children=(1,)), text(1, "a"), var, gen(3, "x", 1), text(4, "z"))))
    assert [type(node).__name__ for node in graph.nodes] == ["Fork", "Text", "Text", "Gen"]
    assert graph.nodes[2].segments == (LiteralText("v="), Var("x", 1), LiteralText("z"))


def test_liveness_after_the_last_use():
    nodes = (Fork(id=0, children=(1, 2)), gen(1, branch=1), gen(2, branch=2), gen(3), text(4, "b", 2))
    graph = liveness(Graph(nodes=nodes), dead=[1, 2])
    assert [(type(node).__name__, node.branch) for node in graph.nodes] == [
        ("Fork", 0),
        ("Gen", 1),
        ("Release", 1),
        ("Gen", 2),
        ("Gen", 0),
        ("Text", 2),
        ("Release", 2),
    ]
    assert validate(graph) == {0}


def test_liveness_counts_joins_variables_and_earlier_releases():
    graph = Graph(
        nodes=(
            Fork(id=0, children=(1, 2, 3)),
            Text(id=1, segments=(Var("x", 1),)),
            Join(id=2, children=(2,)),
            Release(id=3, branch=3),
        )
    )
    released = [(node.id, node.branch) for node in liveness(graph, dead=[1, 2, 3]).nodes if isinstance(node, Release)]
    assert released == [(2, 1), (4, 2), (5, 3)]


def test_liveness_of_a_branch_that_is_not_used():
    graph = liveness(Graph(nodes=(gen(7),)), dead=[4])
    assert [(node.id, type(node).__name__, node.branch) for node in graph.nodes] == [(7, "Release", 4), (8, "Gen", 0)]


def test_common_prefix_of_graphs():
    rows = [
        Graph(
            nodes=(Role(id=0, role="user", begin=True), text(1, f"Sort {item}"), Role(id=2, role="user", begin=False))
        )
        for item in ("cats", "cars")
    ]
    prefix = common_prefix(rows)
    assert prefix.nodes == (Role(id=0, role="user", begin=True), text(1, "Sort ca"))
    assert common_prefix([]).nodes == ()
    assert common_prefix([rows[0]]).nodes == rows[0].nodes
    assert common_prefix([Graph(nodes=(text(0, "a"),)), Graph(nodes=(gen(0),))]).nodes == ()


def said(graph: Graph) -> dict[int, list[str]]:
    """Per branch what is appended, texts joined."""
    found: dict[int, list[str]] = {}
    for node in graph.nodes:
        parts = found.setdefault(node.branch, [])
        if isinstance(node, Text):
            content = "".join(segment.text for segment in node.segments if isinstance(segment, LiteralText))
            if parts and not parts[-1].startswith("\0"):
                parts[-1] += content
            else:
                parts.append(content)
        elif isinstance(node, Gen):
            parts.append(f"\0{node.name}")
    return {branch: parts for branch, parts in found.items() if parts}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.text(min_size=1, max_size=3)), max_size=20))
def test_passes_keep_what_is_said(steps: list[tuple[int, bool, str]]):
    nodes: list = [Fork(id=0, children=(1, 2))]
    for branch, is_gen, content in steps:
        content = content.replace("\0", "0")
        nodes.append(gen(len(nodes), content, branch) if is_gen else text(len(nodes), content, branch))
    graph = Graph(nodes=tuple(nodes))
    result = liveness(merge_text(graph), dead=[1, 2])
    assert said(result) == said(graph)
    assert validate(result) == {0}
    assert merge_text(result).nodes == result.nodes, "merging again finds nothing"


def test_validate_is_used_before_submitting():
    from sgl.errors import InvalidProgram

    with pytest.raises(InvalidProgram, match="does not exist"):
        validate(Graph(nodes=(gen(0, branch=1),)))


def test_a_rewind_brings_the_role_of_its_mark_back():
    def role(id: int, begin: bool) -> Role:
        return Role(id=id, role="user", begin=begin)

    validate(Graph(nodes=(Mark(id=0, label="m"), role(1, True), Rewind(id=2, label="m"), role(3, True))))
    with pytest.raises(InvalidProgram, match="begins inside"):
        validate(
            Graph(nodes=(role(0, True), Mark(id=1, label="m"), role(2, False), Rewind(id=3, label="m"), role(4, True)))
        )


def test_every_graph_that_is_written_says_its_protocol():
    assert b'"protocol":1' in to_json(Graph(nodes=()))
    assert b"protocol" in encode(Graph(nodes=()))


def test_a_graph_without_a_protocol_is_refused():
    for read, bare in ((from_json, b'{"nodes":[]}'), (decode, msgspec.msgpack.encode({"nodes": []}))):
        with pytest.raises(InvalidProgram, match="protocol is missing"):
            read(bare)
