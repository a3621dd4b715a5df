"""The compiler's passes, each on its own, and the checks that point at lines."""

from __future__ import annotations

import pytest

from sgl.errors import InvalidParameter, InvalidProgram, SourceLocation
from sgl.lang.checks import check
from sgl.lang.graph import (
    ARGUMENTS,
    Fork,
    Gen,
    Graph,
    Join,
    LiteralText,
    Node,
    Release,
    Role,
    Select,
    Text,
    Var,
    digest,
    from_json,
    to_json,
)
from sgl.lang.passes import fork_groups, independent, known_next, select_tries


def text(id: int, *segments: str | Var, branch: int = 0) -> Text:
    parts = tuple(LiteralText(segment) if isinstance(segment, str) else segment for segment in segments)
    return Text(id=id, branch=branch, segments=parts, location=at(id))


def gen(id: int, name: str, branch: int = 0) -> Gen:
    return Gen(id=id, branch=branch, name=name, location=at(id))


def at(id: int) -> SourceLocation:
    return SourceLocation("program.py", 10 + id, "program")


def graph(*nodes: Node) -> Graph:
    return Graph(nodes=nodes)


def test_known_next_is_the_literal_text_up_to_what_is_not_known():
    known = known_next(
        graph(
            gen(0, "a"),
            text(1, " and "),
            text(2, "then ", Var("a"), " never"),
            gen(3, "b"),
            Role(id=4, role="user", begin=True),
            Fork(id=5, children=(1,)),
            gen(6, "c", 1),
            text(7, " parent"),
            text(8, " child", branch=1),
        )
    )
    assert [node.next_text for node in known.nodes if isinstance(node, Gen)] == [" and then ", "", " child"]
    assert digest(known_next(known)) == digest(known)


def test_fork_groups_joins_forks_without_anything_between():
    grouped = fork_groups(
        graph(
            Fork(id=0, children=(1,)), text(1, "x", branch=1), Fork(id=2, children=(2,)), text(3, "y"), gen(4, "a", 2)
        )
    )
    assert [type(node).__name__ for node in grouped.nodes] == ["Fork", "Text", "Text", "Gen"]
    assert grouped.nodes[0].children == (1, 2)
    apart = graph(Fork(id=0, children=(1,)), text(1, "x"), Fork(id=2, children=(2,)))
    assert fork_groups(apart) == apart


def test_select_tries_leaves_selects_whose_scores_matter():
    selects = (
        Select(id=0, name="a", choices=("x", "y")),
        Select(id=1, name="b", choices=("x", "y")),
        Select(id=2, name="c", choices=("x", "y"), temperature=1.0),
        Select(id=3, name="d", choices=("x", "y"), method="unconditional_likelihood_normalized"),
    )
    assert [node.all_scores for node in select_tries(graph(*selects), scores=["b"]).nodes] == [False, True, True, True]


def test_independent_makes_branches_and_follows_their_values():
    made = independent(
        graph(
            text(0, "Ann Lee, born 1990. Name: "),
            gen(1, "name"),
            text(2, " Born: "),
            gen(3, "born"),
            text(4, "\n", Var("born"), Var("name")),
            gen(5, "after"),
        ),
        ["name", "born"],
    )
    check(made)
    shape = [(type(node).__name__, node.branch) for node in made.nodes]
    assert shape == [
        ("Text", 0),
        ("Fork", 0),
        ("Gen", 1),
        ("Text", 2),
        ("Gen", 2),
        ("Join", 0),
        ("Release", 1),
        ("Release", 2),
        ("Text", 0),
        ("Gen", 0),
    ]
    assert made.nodes[8].segments[1:] == (Var("born", 2), Var("name", 1))


def test_independent_leaves_single_generations_and_refuses_dependent_ones():
    alone = graph(text(0, "x"), gen(1, "a"), text(2, "y"), gen(3, "other"), gen(4, "b"))
    assert independent(alone, ["a", "b"]) == alone
    with pytest.raises(InvalidProgram, match="reads 'a'") as caught:
        independent(graph(gen(0, "a"), text(1, "so ", Var("a")), gen(2, "b")), ["a", "b"])
    assert caught.value.location == at(1)


@pytest.mark.parametrize(
    ("nodes", "message", "line"),
    [
        ((gen(0, "answer"), text(1, Var("anwser"))), "nothing captures 'anwser'.*did you mean 'answer'", 1),
        ((Fork(id=0, children=(1,)), gen(1, "x", 1), text(2, Var("x"))), "nothing captures 'x' on branch 0", 2),
        ((gen(0, "x"), text(1, "y"), gen(2, "x")), r"'x' is captured twice.*first at program.py:10", 2),
        ((Fork(id=0, children=(1,)), Release(id=1, branch=1), text(2, "x", branch=1)), "branch 1 was released", 2),
        ((text(0, Var("city", ARGUMENTS)),), "'city' is no parameter", 0),
        (
            (
                Fork(id=0, children=(1,)),
                text(1, Var("b", 1)),
                gen(2, "a"),
                text(3, Var("a", 0), branch=1),
                gen(4, "b", 1),
            ),
            "waits for itself.*program.py",
            4,
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_line(nodes: tuple[Node, ...], message: str, line: int):
    with pytest.raises(InvalidProgram, match=message) as caught:
        check(graph(*nodes), parameters=("country",))
    assert caught.value.location == at(line)


def test_a_child_reads_what_its_parent_had_at_the_fork():
    check(graph(gen(0, "x"), Fork(id=1, children=(1,)), text(2, Var("x", 1), branch=1), Join(id=3, children=(1,))))
    with pytest.raises(InvalidProgram, match="nothing captures"):
        check(graph(Fork(id=0, children=(1,)), gen(1, "x"), text(2, Var("x", 1), branch=1)))


def test_an_empty_select_cannot_be_made_nor_read():
    with pytest.raises(InvalidParameter, match="choices is empty"):
        Select(id=0, name="x", choices=())
    data = to_json(graph(Select(id=0, name="x", choices=("a",)))).replace(b'["a"]', b"[]")
    with pytest.raises(InvalidProgram, match="choices is empty"):
        from_json(data)
