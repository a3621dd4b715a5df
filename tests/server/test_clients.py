"""The clients that people have, against `sgl serve` on the embedded model: chat, streams, an agent of two steps with
tools, structured output, embeddings, responses.

A model of 135 million parameters calls tools when it likes to. Where a call is needed, the request demands it, and the
grammar does the rest: what is tested is that the client and the server understand each other, not what the model knows.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Literal

import httpx2
import openai
import pydantic
import pytest
from support.server_process import sgl_serve
from support.serving import serving

from sgl.errors import DownloadFailed
from sgl.runtime.engine import Engine
from sgl.runtime.loading.sources import locate

QUESTION = "What is the weather in Oslo?"


class Trip(pydantic.BaseModel):
    """A trip."""

    city: Literal["Oslo", "Rome"]
    days: int = pydantic.Field(ge=1, le=9)


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    fetched("smollm2-135m")
    with sgl_serve(tmp_path_factory.mktemp("serve") / "log", model="smollm2-135m") as process:
        yield f"{process.url}/v1"
        assert process.end() == 0


def fetched(model: str) -> None:
    """Skip where the weights are not here and cannot be fetched."""
    try:
        locate(model)
    except DownloadFailed as error:
        pytest.skip(f"the model cannot be fetched: {error.message}")


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


# --- openai ---------------------------------------------------------------------------------------------------------


def test_openai_chats_and_streams(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": client.models.list().data[0].id,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 16,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**asked).choices[0].message.content
    assert whole
    chunks = client.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def test_openai_runs_an_agent_of_two_steps(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    asked: dict[str, Any] = {"model": "default", "tools": [TOOL], "temperature": 0, "max_tokens": 64}
    first = client.chat.completions.create(messages=messages, **asked, tool_choice="required").choices[0]
    assert first.finish_reason == "tool_calls"
    calls = first.message.tool_calls or []
    messages.append(first.message)
    for call in calls:
        city = json.loads(call.function.arguments)["city"]  # type: ignore[union-attr]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"It is raining in {city}."})
    answer = client.chat.completions.create(messages=messages, **asked, tool_choice="none").choices[0]
    assert calls
    assert answer.message.content
    assert answer.message.tool_calls is None


def test_openai_parses_structured_output(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Plan a trip to Rome."}]
    found = client.chat.completions.parse(model="default", messages=messages, response_format=Trip, max_tokens=64)
    assert isinstance(found.choices[0].message.parsed, Trip)
    response = client.responses.parse(model="default", input="Plan a trip.", text_format=Trip, max_output_tokens=64)
    assert isinstance(response.output_parsed, Trip)


def test_openai_streams_responses(client: openai.OpenAI) -> None:
    asked: Any = {"model": "default", "input": "Say hello.", "max_output_tokens": 12, "temperature": 0}
    with client.responses.stream(**asked) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert deltas == client.responses.create(**asked).output_text != ""


# --- langchain ------------------------------------------------------------------------------------------------------


@pytest.fixture
def chain(url: str) -> Iterator[Any]:
    from langchain_openai import ChatOpenAI

    http = httpx2.Client()  # its own is shared by all, and never closed
    made: Any = ChatOpenAI(
        http_client=http, base_url=url, api_key="none", model="default", temperature=0, max_tokens=48, max_retries=0
    )  # type: ignore[call-arg,arg-type]
    yield made
    http.close()


def test_langchain_chats_and_streams(chain: Any) -> None:
    whole = chain.invoke("Say hello.")
    assert whole.content
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in chain.stream("Say hello.")) == whole.content


def test_langchain_runs_an_agent_of_two_steps(chain: Any) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    @tool
    def weather(city: Literal["Oslo", "Rome"]) -> str:
        """The weather of a city."""
        return f"It is raining in {city}."

    messages: list[Any] = [HumanMessage(QUESTION)]
    first = chain.bind_tools([weather], tool_choice="any").invoke(messages)
    assert first.tool_calls
    results = [weather.invoke(call) for call in first.tool_calls]
    assert all(isinstance(result, ToolMessage) and "raining" in result.content for result in results)
    answer = chain.bind_tools([weather], tool_choice="none").invoke([*messages, first, *results])
    assert answer.content
    assert not answer.tool_calls


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_has_structured_output(chain: Any, method: str) -> None:
    assert isinstance(chain.with_structured_output(Trip, method=method).invoke("Plan a trip to Rome."), Trip)


def test_langchain_uses_responses(chain: Any, url: str) -> None:
    through = chain.model_copy(update={"use_responses_api": True})
    assert through.invoke("Say hello.").text == chain.invoke("Say hello.").text


# --- pydantic-ai ----------------------------------------------------------------------------------------------------


SETTINGS: Any = {"temperature": 0, "max_tokens": 64}


def with_pydantic_ai(url: str, work: Callable[[Any], Awaitable[None]]) -> None:
    """Run `work` with a model of pydantic-ai, whose connections are closed behind it."""
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            await work(OpenAIChatModel("default", provider=OpenAIProvider(openai_client=client)))

    asyncio.run(run())


def test_pydantic_ai_chats_and_streams(url: str) -> None:
    from pydantic_ai import Agent

    async def work(model: Any) -> None:
        agent = Agent(model, model_settings=SETTINGS)
        whole = await agent.run("Say hello.")
        assert whole.output
        async with agent.run_stream("Say hello.") as stream:
            assert await stream.get_output() == whole.output

    with_pydantic_ai(url, work)


def test_pydantic_ai_runs_an_agent_of_two_steps(url: str) -> None:
    from pydantic_ai import Agent, NativeOutput, Tool

    called: list[str] = []

    async def once(ctx: Any, tool: Any) -> Any:
        return tool if ctx.run_step == 1 else None

    def settings(ctx: Any) -> Any:
        return {**SETTINGS, "tool_choice": ["weather"]} if ctx.run_step == 1 else SETTINGS

    def weather(city: Literal["Oslo", "Rome"]) -> str:
        """The weather of a city."""
        called.append(city)
        return f"It is raining in {city}."

    async def work(model: Any) -> None:
        agent = Agent(
            model, output_type=NativeOutput(Trip), tools=[Tool(weather, prepare=once)], model_settings=settings
        )
        assert isinstance((await agent.run(QUESTION)).output, Trip)

    with_pydantic_ai(url, work)
    assert called


def test_pydantic_ai_has_structured_output(url: str) -> None:
    from pydantic_ai import Agent, NativeOutput

    async def work(model: Any) -> None:
        agent = Agent(model, output_type=NativeOutput(Trip), model_settings=SETTINGS)
        assert isinstance((await agent.run("Plan a trip to Rome.")).output, Trip)

    with_pydantic_ai(url, work)


# --- instructor -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor_has_structured_output(client: openai.OpenAI, mode: str) -> None:
    instructor = pytest.importorskip("instructor", reason="make installs it, apart from its dependencies")
    through: Any = instructor.from_openai(client, mode=instructor.Mode[mode])
    asked: dict[str, Any] = {"model": "default", "temperature": 0, "max_tokens": 64, "max_retries": 0}
    messages: list[Any] = [{"role": "user", "content": "Plan a trip to Rome."}]
    whole = through.chat.completions.create(response_model=Trip, messages=messages, **asked)
    assert isinstance(whole, Trip)
    # Partial models have a tool of another name, so a prompt of their own.
    parts = list(through.chat.completions.create_partial(response_model=Trip, messages=messages, **asked))
    assert len(parts) > 1
    Trip.model_validate(parts[-1].model_dump())


def test_instructor_runs_an_agent_of_two_steps(client: openai.OpenAI) -> None:
    instructor = pytest.importorskip("instructor", reason="make installs it, apart from its dependencies")

    class Weather(pydantic.BaseModel):
        """Look the weather up."""

        city: Literal["Oslo", "Rome"]

    through: Any = instructor.from_openai(client)
    asked: dict[str, Any] = {"model": "default", "temperature": 0, "max_tokens": 64, "max_retries": 0}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    call = through.chat.completions.create(response_model=Weather, messages=messages, **asked)
    messages += [
        {"role": "assistant", "content": call.model_dump_json()},
        {"role": "user", "content": f"It is raining in {call.city}. Where do I go?"},
    ]
    assert isinstance(through.chat.completions.create(response_model=Trip, messages=messages, **asked), Trip)


# --- embeddings -----------------------------------------------------------------------------------------------------


def test_embeddings() -> None:
    from langchain_openai import OpenAIEmbeddings

    fetched("minilm-l6")
    texts = ["A cat sat on the mat.", "A kitten rests on the rug.", "Interest rates rose again."]
    with Engine(model_path="minilm-l6") as engine, serving(engine) as served, httpx2.Client() as http:
        url = f"{served.url}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            found = [item.embedding for item in client.embeddings.create(model="default", input=texts).data]
        lang = OpenAIEmbeddings(
            http_client=http, base_url=url, api_key="none", model="default", check_embedding_ctx_length=False
        )
        assert lang.embed_documents(texts)[0] == pytest.approx(found[0], abs=1e-6)

    def likeness(left: list[float], right: list[float]) -> float:
        return sum(a * b for a, b in zip(left, right, strict=True))

    assert likeness(found[0], found[1]) > likeness(found[0], found[2]) + 0.2
