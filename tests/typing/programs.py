"""Programs as users write them, with what a type checker says of each (see `test_typing`). Never run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, reveal_type

import sgl


@dataclass
class Person:
    name: str
    age: int


@sgl.function
def describe(s: sgl.ProgramState, name: str, year: int = 1800) -> Person:
    person = sgl.gen("person", type=Person)
    s += f"{name}, born {year}: " + person
    reveal_type(s[person])  # reveals: Person
    reveal_type(s["person"])  # reveals: Any
    number = sgl.gen(type=int, max_tokens=4)
    reveal_type(number)  # reveals: GenExpr[int]
    reveal_type(sgl.gen("text", max_tokens=4))  # reveals: GenExpr[str]
    reveal_type(sgl.gen("many", type=list[int]))  # reveals: GenExpr[list[int]]
    reveal_type(sgl.gen("one", choices=["a", "b"]))  # reveals: SelectExpr
    reveal_type(sgl.gen("lit", type=Literal["a"]))  # reveals: GenExpr[Any]
    reveal_type(s.require(number, lambda n: n > 2))  # reveals: int
    for fork in s.fork(2):
        reveal_type(fork)  # reveals: ProgramState[Any]
    s += 3  # error: arg-type
    sgl.gen("x", max_tokens="4")  # error: call-overload
    return s[person]


@sgl.function
async def later(s: sgl.AsyncProgramState, topic: str) -> int:
    count = sgl.gen("count", type=int)
    s += topic + count
    reveal_type(await s[count])  # reveals: int
    forks = s.fork(2)
    reveal_type(forks[0])  # reveals: AsyncProgramState
    return await s[count]


class Agent:
    @sgl.function
    def greet(self, s: sgl.ProgramState, name: str) -> str:
        s += name
        return name


def use() -> None:
    reveal_type(describe("Ada"))  # reveals: ProgramState[Person]
    reveal_type(describe("Ada", year=1815).ret_value)  # reveals: Person
    describe(3)  # error: arg-type
    describe("Ada", when=3)  # error: call-arg
    reveal_type(describe.run("Ada", temperature=0).ret_value)  # reveals: Person
    describe.run("Ada", temperature="hot")  # error: arg-type
    reveal_type(later("tea").ret_value)  # reveals: int
    reveal_type(Agent().greet("Ada").ret_value)  # reveals: str
    Agent().greet()  # error: call-arg
    for result in describe.batch([{"name": "Ada"}]):
        reveal_type(result.state.ret_value)  # reveals: Person


async def use_async() -> None:
    reveal_type((await later.run_async("tea")).ret_value)  # reveals: int
    async for result in later.batch([["tea"]]):
        reveal_type(result.index)  # reveals: int


@sgl.function
def untyped(s, question):  # type: ignore[no-untyped-def]
    s += question


def use_untyped() -> None:
    untyped("x")
    untyped.run("x", temperature=0)
