"""HTTP requests that nobody should send: each has its own answer, and the server goes on. Named by their rows in the
table of faults: 1 to 23, 25 to 27, 42, 45, 66 to 71. What the engine says of values is tested at its own door; here it
is that the way to it is bounded, and that answers are in shape.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from support.http_line import status_of, talk
from support.serving import Served, serving

from sgl.runtime.engine import Engine
from sgl.server import app, native
from sgl.server.call import Call
from sgl.server.routes import Routes
from sgl.server.transport import FREE_PIECES

KEY, ADMIN = "user-key-1234", "admin-key-5678"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
TEXT: dict[str, Any] = {"prompt": "Hi", "max_tokens": 2}
SLOW = {"header_timeout": 0.5, "body_timeout": 0.5}


@pytest.fixture(scope="module")
def served(dummy_engine: Engine) -> Iterator[Served]:
    with serving(dummy_engine, max_body_bytes=2**20, max_header_bytes=8192, **SLOW) as server:
        yield server


@pytest.fixture(scope="module")
def guarded(dummy_engine: Engine) -> Iterator[Served]:
    with serving(dummy_engine, api_key=(KEY,), admin_api_key=ADMIN) as server:
        yield server


@pytest.fixture
def http(served: Served) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=served.url, trust_env=False) as client:
        yield client


def works(http: httpx2.Client) -> None:
    assert http.post("/v1/chat/completions", json=CHAT).status_code == 200


def error_of(response: httpx2.Response) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    error = response.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in error["message"]
    return dict(error)


def test_row_01_a_huge_head_is_refused_before_it_is_read(served: Served, http: httpx2.Client) -> None:
    answer = talk(served.port, b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: ", b"a" * 2**20, b"a" * 2**20)
    assert status_of(answer) == 431
    works(http)


def test_row_01_what_is_no_http_is_refused(served: Served) -> None:
    assert status_of(talk(served.port, b"\x16\x03\x01 nonsense\r\n\r\n")) == 400


def test_row_02_a_body_that_says_it_is_huge_is_not_read(served: Served) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1073741824\r\n\r\n"
    answer = talk(served.port, head)
    assert status_of(answer) == 413
    assert b"connection: close" in answer.lower()


@pytest.mark.parametrize(
    ("chunk", "status", "word"),
    [(b"6\r\naaaaaa\r\n", 400, b"pieces"), (b"100\r\n" + b"a" * 256 + b"\r\n", 413, b"65536")],
    ids=["six bytes", "256 bytes"],
)
def test_row_02_an_endless_body_in_chunks_ends_at_the_bound(
    dummy_engine: Engine, chunk: bytes, status: int, word: bytes
) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with serving(dummy_engine, max_body_bytes=2**16) as served:
        answer = talk(served.port, head, *[chunk * 1000] * 20)
        assert status_of(answer) == status
        assert word in answer
        with httpx2.Client(base_url=served.url) as http:
            works(http)


def test_row_02_a_body_in_as_many_pieces_as_are_free_is_taken(dummy_engine: Engine) -> None:
    """Bytes one by one, as some clients flush them, up to the bound."""
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    body = b'{"prompt": "a", "max_tokens": 1' + b" " * (FREE_PIECES - 32) + b"}"
    pieces = b"".join(b"1\r\n%c\r\n" % each for each in body)
    with serving(dummy_engine) as served:
        assert status_of(talk(served.port, head, pieces + b"0\r\n\r\n")) == 200


@pytest.mark.parametrize("body", [b"[" * 20_000, b'{"prompt":' * 1000, b'{"prompt": "' + b"\\" * 9999 + b"["])
def test_row_03_nested_json_is_bounded(http: httpx2.Client, body: bytes) -> None:
    assert http.post("/v1/completions", content=body).status_code == 400
    tools = {"a": 1}
    for _ in range(200):
        tools = {"a": tools}  # type: ignore[dict-item]
    response = http.post("/v1/chat/completions", content=json.dumps({**CHAT, "metadata": tools}))
    assert "deeper" in error_of(response)["message"]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", '"NaN"', "1e999", "-1"])
def test_rows_04_13_numbers_that_are_none(http: httpx2.Client, value: str) -> None:
    response = http.post("/v1/completions", content=f'{{"prompt": "a", "temperature": {value}}}')
    assert response.status_code == 400
    error_of(response)


def test_row_05_lone_surrogates_and_nul(http: httpx2.Client) -> None:
    for path, body in (
        ("/v1/completions", '{"prompt": "a\\ud83d", "max_tokens": 1}'),
        ("/v1/completions", '{"prompt": "a", "max_tokens": 1, "json_schema": {"const": "\\ud83d"}}'),
        ("/v1/chat/completions", '{"messages": [{"role": "\\ud83d", "content": "x"}]}'),
        ("/v1/completions", '{"prompt": "a", "\\ud83d": 1}'),
    ):
        response = http.post(path, content=body)
        assert response.status_code == 400, (body, response.text)
        error_of(response)
    assert http.post("/v1/completions", content='{"prompt": "a\\u0000b", "max_tokens": 1}').status_code == 200


def test_row_06_a_slow_sender_is_let_go(served: Served, http: httpx2.Client) -> None:
    slow_head = talk(served.port, *(bytes([each]) for each in b"GET /health HTTP/1.1\r\n"), pause_s=0.05)
    assert status_of(slow_head) == 408
    assert talk(served.port) == b""  # nothing was asked: nothing is answered
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
    assert status_of(talk(served.port, head, b'{"p', b"rom", pause_s=0.3)) == 408
    works(http)


def test_row_08_oversized_text_is_refused_by_its_bytes(http: httpx2.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": "a" * 2**20})
    assert response.status_code == 413
    assert error_of(response)["code"] == "body_too_large"


def test_row_09_prompts_at_the_edge_of_the_context(http: httpx2.Client, served: Served) -> None:
    context = served.server.context_len
    response = http.post("/v1/completions", json={"prompt": [1] * (context + 1), "max_tokens": 1})
    assert response.status_code == 400
    assert str(context) in error_of(response)["message"]
    fits = http.post("/v1/completions", json={"prompt": [1] * (context - 3), "max_tokens": 50, "ignore_eos": True})
    assert fits.json()["choices"][0]["finish_reason"] == "length"


BAD: list[tuple[int, str, dict[str, Any]]] = [
    (10, "/v1/completions", {"prompt": ""}),
    (10, "/v1/completions", {"prompt": []}),
    (10, "/v1/completions", {"prompt": [""]}),
    (10, "/v1/completions", {"prompt": [[]]}),
    (10, "/v1/chat/completions", {"messages": []}),
    (10, "/generate", {"text": ""}),
    (11, "/v1/completions", {"prompt": [-1]}),
    (11, "/v1/completions", {"prompt": [10**6], "max_tokens": 1}),
    (11, "/v1/completions", {"prompt": [True]}),
    (11, "/v1/completions", {"prompt": [1, "a"]}),
    (11, "/generate", {"input_ids": [2**40]}),
    (11, "/detokenize", {"tokens": [-1]}),
    (12, "/v1/completions", {**TEXT, "logit_bias": {"999999": 1}}),
    (12, "/v1/completions", {**TEXT, "stop_token_ids": [999999]}),
    (12, "/generate", {"text": "a", "token_ids_logprob": [999999], "return_logprob": True}),
    (13, "/v1/chat/completions", {**CHAT, "top_p": 0}),
    (13, "/v1/chat/completions", {**CHAT, "presence_penalty": 1e308}),
    (14, "/v1/chat/completions", {**CHAT, "n": 10**6}),
    (14, "/v1/completions", {**TEXT, "n": 0}),
    (14, "/v1/completions", {**TEXT, "best_of": 10**6}),
    (16, "/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 10**6}),
    (16, "/v1/completions", {**TEXT, "logprobs": -1}),
    (17, "/v1/completions", {**TEXT, "stop": ["x"] * 10_000}),
    (17, "/v1/completions", {**TEXT, "stop": "x" * 2**17}),
    (17, "/v1/completions", {**TEXT, "stop": ""}),
    (18, "/v1/completions", {**TEXT, "max_tokens": -1}),
    (18, "/v1/completions", {**TEXT, "seed": -(2**63)}),
    (18, "/v1/completions", {**TEXT, "top_k": -(2**63)}),
    (18, "/generate", {"text": "a", "sampling_params": {"max_new_tokens": -1}}),
    (19, "/v1/completions", {**TEXT, "temprature": 1}),
    (19, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x", "contnt": "y"}]}),
    (19, "/v1/completions", {**TEXT, "guided_json": {}}),
    (20, "/v1/completions", {"prompt": ["a"] * 100_000, "max_tokens": 1}),
    (23, "/v1/chat/completions", {**CHAT, "chat_template": "{{ 1 }}"}),
    (25, "/v1/completions", {**TEXT, "regex": "("}),
    (25, "/v1/completions", {**TEXT, "regex": "(?<=a)b"}),
    (26, "/v1/completions", {**TEXT, "json_schema": {"properties": {"foo": "bar"}}}),
    (26, "/v1/completions", {**TEXT, "json_schema": ""}),
    (26, "/v1/completions", {**TEXT, "response_format": {"type": "json_schema"}}),
    (26, "/v1/completions", {**TEXT, "structured_outputs": {"choice": [""]}}),
    (27, "/v1/completions", {**TEXT, "regex": "(" * 60_000}),
    (66, "/v1/completions", {**TEXT, "custom_logit_processor": "os.system"}),
    (66, "/generate", {"text": "a", "custom_logit_processor": {"dill": "gASV"}}),
    (67, "/generate", {"input_embeds": [[0.0]]}),
    (70, "/v1/chat/completions", {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}]}]}),
    (70, "/v1/chat/completions", {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]}),
]  # fmt: skip


@pytest.mark.parametrize(("row", "path", "body"), BAD, ids=[f"row_{row:02}-{n}" for n, (row, _, _) in enumerate(BAD)])
def test_bad_values_are_the_callers_to_mend(http: httpx2.Client, row: int, path: str, body: dict[str, Any]) -> None:
    response = http.post(path, json=body)
    assert response.status_code == 400, response.text
    error_of(response)


def test_the_server_works_after_all_of_them(http: httpx2.Client) -> None:
    for _, path, body in BAD:
        http.post(path, json=body)
    works(http)


def test_row_19_lenient_mode_passes_unknown_fields_over_and_says_so(dummy_engine: Engine) -> None:
    body = {"messages": [{"role": "user", "content": "x", "odd": 1}], "max_tokens": 1, "temprature": 1}
    with serving(dummy_engine, lenient=True) as served, httpx2.Client(base_url=served.url) as http:
        response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert any("did you mean 'temperature'?" in each for each in response.json()["warnings"])
    assert "messages[0].odd" in " ".join(response.headers.get_list("x-warning"))


@pytest.mark.parametrize("name", ["x` - at `$.zzz", "x` - at `$.messages[7]", "x` - at `$.max_tokens.a"])
def test_row_19_names_that_look_like_paths_are_refused_in_lenient_mode(dummy_engine: Engine, name: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, name: 1}
    with serving(dummy_engine, lenient=True) as served, httpx2.Client(base_url=served.url) as http:
        assert http.post("/v1/chat/completions", json=body).status_code == 400


def test_row_42_tenants_neither_see_nor_end_what_runs_under_an_id_of_another(dummy_engine: Engine) -> None:
    long = {"text": "a", "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}, "rid": "job", "stream": True}
    short = {"text": "b", "rid": "job", "sampling_params": {"max_new_tokens": 1}}
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    with (
        serving(dummy_engine, api_key=("one", "two")) as served,
        httpx2.Client(base_url=served.url) as http,
        http.stream("POST", "/generate", json=long, headers=one) as first,
    ):
        lines = first.iter_lines()
        next(lines)
        with httpx2.Client(base_url=served.url) as other:
            assert other.post("/generate", json=short, headers=two).is_success
            assert other.post("/abort_request", json={"rid": "job"}, headers=two).json() == {"aborted": 0}
            assert other.post("/abort_request", json={"rid": "job"}, headers=one).json() == {"aborted": 1}
        assert "cancelled" in [line for line in lines if line][-1]


def test_row_42_an_id_that_is_in_use_is_refused_and_its_owner_goes_on(
    served: Served, http: httpx2.Client, dummy_engine: Engine
) -> None:
    long = {"text": "a", "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}, "rid": "mine", "stream": True}
    with http.stream("POST", "/generate", json=long) as first:
        lines = first.iter_lines()
        next(lines)
        with httpx2.Client(base_url=served.url) as other:
            assert error_of(other.post("/generate", json={"text": "b", "rid": "mine"}))["param"] == "rid"
            assert other.post("/abort_request", json={"rid": "mine"}).json() == {"aborted": 1}
        last = [line for line in lines if line][-1]
    assert "cancelled" in last
    assert http.post(
        "/generate", json={"text": "b", "rid": "mine", "sampling_params": {"max_new_tokens": 1}}
    ).is_success


def test_row_45_to_abort_what_is_not_there_is_no_error(http: httpx2.Client) -> None:
    for number in range(50):
        assert http.post("/abort_request", json={"rid": f"none-{number}"}).json() == {"aborted": 0}


def test_row_68_every_route_has_a_tier_and_is_shut_without_its_key(guarded: Served) -> None:
    known = {(route.method, route.path) for route in app.table()}
    inner = app.create_app(guarded.server)._app  # type: ignore[attr-defined]
    for route in inner.routes:
        assert {(method, route.path) for method in route.methods - {"HEAD"}} <= known
    with httpx2.Client(base_url=guarded.url) as http:
        for route in app.table():
            path = route.path.replace("{branch:int}", "0").replace("{model:path}", "x").replace("{id}", "x")
            expected = {"open": {200}, "user": {401}, "admin": {401}}[route.tier]
            assert http.request(route.method, path, content=b"{}").status_code in expected, route
            user = http.request(route.method, path, content=b"{}", headers={"Authorization": f"Bearer {KEY}"})
            assert (user.status_code == 403) == (route.tier == "admin"), route
        admin = http.post("/flush_cache", headers={"x-api-key": ADMIN})
        assert admin.status_code in (200, 400), admin.text


def test_row_68_without_an_admin_key_admin_routes_are_shut(dummy_engine: Engine) -> None:
    with serving(dummy_engine, api_key=(KEY,)) as served, httpx2.Client(base_url=served.url) as http:
        response = http.post("/flush_cache", headers={"Authorization": f"Bearer {KEY}"})
    assert response.status_code == 403
    assert "--admin-api-key" in error_of(response)["message"]


def test_row_69_keys_are_in_nothing_that_is_shown(guarded: Served, caplog: pytest.LogCaptureFixture) -> None:
    with httpx2.Client(base_url=guarded.url, headers={"Authorization": f"Bearer {KEY}"}) as http:
        info = http.get("/server_info").text
        wrong = http.get("/v1/models", headers={"Authorization": "Bearer wrong-key-9"})
    shown = info + wrong.text + caplog.text + repr(guarded.server.config)
    assert not any(secret in shown for secret in (KEY, ADMIN, "wrong-key-9"))


def test_row_70_a_page_elsewhere_reaches_no_server_without_a_key(http: httpx2.Client) -> None:
    assert http.get("/health", headers={"Host": "evil.example"}).status_code == 403
    assert http.get("/health", headers={"Host": "localhost:30000"}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_row_70_a_page_elsewhere_changes_nothing_and_asks_nothing(
    http: httpx2.Client, guarded: Served, headers: dict[str, str]
) -> None:
    for path in ("/abort_all_requests", "/flush_cache", "/v1/completions"):
        refused = http.post(path, json=TEXT, headers={**headers, "Content-Type": "text/plain"})
        assert (refused.status_code, error_of(refused)["code"]) == (403, "forbidden")
    own = {"Origin": str(http.base_url).rstrip("/"), "Sec-Fetch-Site": "same-origin"}
    assert http.post("/v1/completions", json=TEXT, headers=own).status_code == 200
    with httpx2.Client(base_url=guarded.url) as keyed:  # a page that has a key was given it
        bearer = {**headers, "Authorization": f"Bearer {KEY}"}
        assert keyed.post("/v1/completions", json=TEXT, headers=bearer).status_code == 200


def test_row_70_allowed_hosts_are_origins_too(dummy_engine: Engine) -> None:
    with serving(dummy_engine, allowed_hosts=("app.example",)) as served, httpx2.Client(base_url=served.url) as http:
        for origin, status in (("https://app.example", 200), ("https://evil.example", 403)):
            headers = {"Host": "app.example:80", "Origin": origin}
            assert http.post("/v1/completions", json=TEXT, headers=headers).status_code == status


def test_row_70_a_body_that_says_it_is_no_json_is_refused(http: httpx2.Client) -> None:
    form = "application/x-www-form-urlencoded"
    body = b'{"prompt": "Hi", "max_tokens": 1}'
    for kind, more, status in (
        ("text/plain", {}, 415),
        ("multipart/form-data; boundary=x", {}, 415),
        (form, {"Sec-Fetch-Site": "none"}, 415),
        (form, {}, 200),
        ("application/json; charset=utf-8", {}, 200),
    ):
        answer = http.post("/v1/completions", content=body, headers={"Content-Type": kind, **more})
        assert answer.status_code == status, kind


def test_row_71_a_bug_outside_of_every_handler_has_its_shape_too(
    served: Served, http: httpx2.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(call: Call) -> None:
        raise RuntimeError("secret inside")

    with monkeypatch.context() as patched:
        patched.setattr(Call, "close", fails)
        response = http.get("/version", headers={"X-Request-Id": "mine-2"})
    assert response.status_code == 500
    assert "mine-2" in error_of(response)["message"]
    assert "secret inside" not in response.text
    end = time.monotonic() + 30
    while "secret inside" not in caplog.text:  # it is logged once the answer is out
        assert time.monotonic() < end
        time.sleep(0.01)
    assert "Exception in ASGI" not in caplog.text
    works(http)


def test_row_71_a_bug_says_nothing_of_the_inside(
    dummy_engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Routes()

    @broken.get("/broken", "open")
    async def fails(call: Call) -> None:
        """Fails."""
        raise RuntimeError(f"secret inside {call!r}")

    monkeypatch.setattr(native.routes, "all", [*native.routes.all, *broken.all])
    with serving(dummy_engine) as served, httpx2.Client(base_url=served.url) as http:
        response = http.get("/broken", headers={"X-Request-Id": "mine-1"})
    assert response.status_code == 500
    error = error_of(response)
    assert "mine-1" in error["message"]
    assert response.headers["x-request-id"] == "mine-1"
    assert "secret inside" not in response.text
    assert "secret inside" in caplog.text
    assert "mine-1" in caplog.text
