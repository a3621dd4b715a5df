"""The playground as its users meet it: a real `sgl serve`, a real browser, every tab clicked through.

`SGL_SCREENSHOTS=FOLDER` keeps the screenshots there; otherwise they are in pytest's temporary folder of the run.
`SGL_PLAYGROUND_MODEL=smollm2-135m` shows them with real text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from support.browser import Page, browsing, chromium
from support.serving import serving

import sgl
from sgl.bench.serve import own_server
from sgl.runtime.engine import Engine
from sgl.server.playground import page
from sgl.server.playground.examples import FILE, as_json

MODEL = os.environ.get("SGL_PLAYGROUND_MODEL", "dummy")
NARROW, WIDE = 360, 1280
needs_browser = pytest.mark.skipif(chromium() is None, reason="no Chromium here")


# --- without a browser ----------------------------------------------------------------------------------------------


def test_the_graphs_that_ship_are_those_of_the_programs() -> None:
    assert FILE.read_bytes() == as_json(), "run: python -m sgl.server.playground.examples"


def test_the_policy_allows_exactly_what_is_in_the_page() -> None:
    text, policy = page()
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == "'self'"
    for name, tag in (("script-src", "<script>"), ("style-src", "<style>")):
        (inside,) = re.findall(f"{tag}(.*?)</{tag[1:]}".encode(), text, re.DOTALL)
        assert rules[name] == f"'sha256-{base64.b64encode(hashlib.sha256(inside).digest()).decode()}'"
    markup = re.sub(rb"<(script|style)[^>]*>.*?</\1>", b"", text, flags=re.DOTALL)
    assert not re.search(rb"\son\w+=|\sstyle=|https?:", markup)
    assert b"{{" not in markup
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\b", text.decode())
    assert len(text) < 100_000


def test_anybody_gets_the_page_unless_it_is_off(dummy_engine: Engine) -> None:
    with serving(dummy_engine, api_key=("secret-key-0",)) as served, httpx2.Client(base_url=served.url) as http:
        response = http.get("/")
        assert (response.status_code, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert b"secret-key-0" not in response.content
        assert response.headers["content-security-policy"] == page()[1]
        head = http.head("/")
        assert (head.status_code, head.content) == (200, b"")
    with serving(dummy_engine, playground=False) as served:
        assert httpx2.get(f"{served.url}/", trust_env=False).status_code == 404


ELEMENTS = """
class Element {
  constructor(tag, attributes, parts) {
    Object.assign(this, { tag, className: attributes.class || "", style: {}, parts });
  }
  get textContent() { return this.parts.map((part) => part.textContent ?? part).join(""); }
  set textContent(text) { this.parts = [text]; }
  append(...parts) { for (const part of parts) { part.around = this; this.parts.push(part); } }
  replaceChildren(...parts) {
    this.parts = [];
    this.append(...parts.map((part) => part.tag ? part : new String(part)));
  }
  after(...parts) { this.around.parts.splice(this.around.parts.indexOf(this) + 1, 0, ...parts); }
}
const make = (tag, attributes = {}, ...parts) => new Element(tag, attributes, parts);
const byId = () => ({ textContent: "[]" });
class Job {}
"""
"""As much of a document as `program.js` needs to show a run."""


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node.js here")
def test_a_select_is_shown_once(dummy_engine: Engine) -> None:
    @sgl.function
    def grade(s: sgl.ProgramState) -> None:
        s += "Essay. Grade: " + sgl.select("grade", ["A", "B"]) + ", as it is: " + sgl.select("again", ["C", "D"])

    graph = json.loads(grade.compile().to_json())
    with serving(dummy_engine) as served:
        response = httpx2.post(f"{served.url}/v1/programs", json={"program": graph, "stream": True}, trust_env=False)
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
    whole = next(event["text"] for event in events if event["type"] == "done")
    show = f"""
const output = make("div", {{}});
const run = new ProgramRun({{}}, output);
const shown = (part) => part.className === "counts" || part.tag === "ul" ? "" : part.parts
  ? part.parts.map(shown).join("") : String(part);
(async () => {{
  for (const event of {json.dumps(events)}) await run.take(event);
  console.log(JSON.stringify(output.parts[0].parts.slice(1).map(shown)));
}})();"""
    source = (FILE.parent / "program.js").read_text(encoding="utf-8")
    done = subprocess.run(["node", "-e", ELEMENTS + source + show], capture_output=True, text=True, check=False)
    assert (done.stderr, json.loads(done.stdout or "[]")) == ("", [whole])


# --- in a browser ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get("SGL_SCREENSHOTS")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    tokens = {"max_total_tokens": 8192} if MODEL == "dummy" else {}
    with own_server({"model_path": MODEL, "num_threads": 1, **tokens}) as found:
        yield found


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browsing(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture(params=[NARROW, WIDE])
def shown(request: pytest.FixtureRequest, tab: Page, url: str) -> Iterator[Page]:
    """The page in a narrow and in a wide window; no test may make it complain, or scroll sideways."""
    tab.complaints.clear()
    tab.open(url, width=request.param, dark=request.param == WIDE)
    tab.until("document.querySelector('#model').textContent !== 'connecting'")
    yield tab
    assert tab.complaints == []
    assert tab.value("document.documentElement.scrollWidth <= innerWidth")


def done(page: Page, status: str) -> str:
    """Wait until a job's last word is there."""
    page.until(f"!['', 'running'].includes(document.querySelector('{status}').textContent)")
    return page.text(status)


def picture(page: Page, folder: Path, name: str) -> None:
    page.screenshot(folder / f"{name}-{page.value('innerWidth')}.png")


@needs_browser
def test_chat(shown: Page, pictures: Path) -> None:
    shown.click("#chat summary")
    shown.fill("#chat-system", "Answer in one word.")
    shown.fill("#chat-max-tokens", "24")
    shown.fill("#chat-temperature", "0")
    shown.fill("#chat-input", "<img src=x onerror=alert(1)> Say hello.")
    shown.press("Enter", 13)
    assert re.search(r"\b24 generated" if MODEL == "dummy" else "generated", done(shown, "#chat-status"))
    assert shown.value("document.querySelectorAll('#chat-log .turn').length") == 2
    assert shown.value("document.querySelectorAll('#chat-log img').length") == 0
    assert shown.text("#chat-log .user .body") == "<img src=x onerror=alert(1)> Say hello."
    shown.fill("#chat-input", "And again.")
    shown.click("#chat-send")
    shown.until("document.querySelectorAll('#chat-log .assistant').length === 2")
    cached = re.search(r"\((\d+) cached\)", done(shown, "#chat-status"))
    assert cached is not None
    assert int(cached[1]) > 40  # the first turn, which the engine still has
    picture(shown, pictures, "chat")


@needs_browser
def test_a_generation_is_stopped_and_the_chat_goes_on(shown: Page) -> None:
    shown.click("#chat summary")
    shown.fill("#chat-max-tokens", "1500")
    shown.fill("#chat-input", "Count.")
    shown.click("#chat-send")
    shown.until("document.querySelector('#chat-log .assistant .body').textContent.length > 5")
    shown.click("#chat-stop-button")
    shown.until("document.querySelector('#chat-stop-button').disabled")
    assert shown.text("#chat-status") == "stopped"
    shown.fill("#chat-max-tokens", "4")
    shown.fill("#chat-input", "More.")
    shown.click("#chat-send")
    shown.until("document.querySelectorAll('#chat-log .assistant').length === 2")
    assert "generated" in done(shown, "#chat-status")
    shown.click("#chat-new")
    assert shown.text("#chat-log") == ""


@needs_browser
def test_reasoning_stands_apart(tab: Page, dummy_engine: Engine) -> None:
    with serving(dummy_engine, reasoning_parser="deepseek-r1") as served:  # whose reasoning needs no opening
        tab.complaints.clear()
        tab.open(served.url)
        tab.click("#chat summary")
        tab.fill("#chat-max-tokens", "30")
        tab.fill("#chat-input", "Why?")
        tab.press("Enter", 13)
        assert "generated" in done(tab, "#chat-status")
        assert tab.text("#chat-log .assistant details .body") != ""
        assert tab.text("#chat-log .assistant > .body") == ""
        assert tab.complaints == []
        tab.call("Page.navigate", url="about:blank")


@needs_browser
def test_program(shown: Page, pictures: Path) -> None:
    shown.click("#tab-program")
    shown.fill("#program-bindings [data-name=essay]", "Tea <b>is</b> good.")
    shown.click("#program-run")
    assert done(shown, "#program-status").startswith("done")
    assert shown.value("document.querySelectorAll('#program-output .branches > .branch').length") == 3
    tops = shown.value("[...document.querySelectorAll('.branches > .branch')].map((b) => b.offsetTop)")
    assert (len(set(tops)) == 1) == (shown.value("innerWidth") == WIDE)  # side by side where there is room
    output = shown.text("#program-output")
    assert "Tea <b>is</b> good." in output
    branch = shown.value(
        "[...document.querySelector('#program-output > .branch > .text').children].filter((e) => \
e.matches(':not(.branches, .counts, .bars)')).map((e) => e.textContent).join('')"
    )
    assert [len(grade) for grade in re.findall("Grade: ([A-C]+)", branch)] == [1]
    assert shown.value("[...document.querySelectorAll('#program-output .cached')].some((s) => s.textContent)")
    bars = shown.value(
        "[...document.querySelectorAll('.bars li span:last-child')].map((s) => parseFloat(s.textContent))"
    )
    assert len(bars) == 3
    assert abs(sum(bars) - 100) < 0.5
    assert bars == sorted(bars, reverse=True)
    # Every token is told as one of four kinds, and they add up to the program's own figures.
    counts = [re.findall(r"(\d+) (\w+)", line) for line in shown.value(
        "[...document.querySelectorAll('.counts')].map((s) => s.textContent)"
    )]  # fmt: skip
    total = {kind: sum(int(n) for line in counts for n, k in line if k == kind) for kind in ("generated", "forced")}
    said = re.search(r"(\d+) generated, (\d+) of them forced", shown.text("#program-status"))
    assert said is not None
    assert int(said[1]) == total["generated"] + total["forced"]
    picture(shown, pictures, "program")


@needs_browser
def test_forced_tokens_have_their_colour(shown: Page, pictures: Path) -> None:
    shown.click("#tab-program")
    titles = shown.value("[...document.querySelectorAll('#program-example option')].map((o) => o.textContent)")
    shown.choose("#program-example", str(titles.index("A person in JSON")))
    shown.click("#program-run")
    assert done(shown, "#program-status").startswith("done")
    spans = "[...document.querySelectorAll('[data-name=person] > span')].map((s) => [s.className, s.textContent])"
    pieces = shown.value(spans)
    assert {kind for kind, _ in pieces} == {"forced", "generated"}
    written = "".join(text for _, text in pieces)
    assert set(json.loads(written)) == {"name", "age", "likes"}
    assert pieces[0][0] == "forced"
    assert pieces[0][1].startswith("{")
    picture(shown, pictures, "forced")


@needs_browser
def test_every_example_runs(tab: Page, url: str) -> None:
    tab.complaints.clear()
    tab.open(f"{url}/#program")
    for index in range(tab.value("document.querySelectorAll('#program-example option').length")):
        tab.choose("#program-example", str(index))
        tab.click("#program-run")
        assert done(tab, "#program-status").startswith("done"), index
    tab.fill("#program-bindings textarea", "x" * 20_000)
    tab.click("#program-run")
    assert "context" in done(tab, "#program-status")
    assert tab.value("document.querySelector('#program-status').classList.contains('error')")
    tab.value("document.querySelector('#program-graph').value = '{'")
    tab.click("#program-run")
    assert "no JSON" in done(tab, "#program-status")
    assert tab.complaints == []


@needs_browser
def test_schema(shown: Page, pictures: Path) -> None:
    shown.click("#tab-schema")
    shown.click("#schema-run")
    shown.until("document.querySelector('#schema-mark').textContent")
    assert shown.text("#schema-mark") == "✓ valid"
    assert set(json.loads(shown.text("#schema-output"))) == {"name", "age", "likes"}
    picture(shown, pictures, "schema")
    shown.fill("#schema-text", '{"enum": ["a"], "type": "string"}')
    shown.click("#schema-run")
    shown.until("document.querySelector('#schema-output').textContent === '\"a\"'")
    shown.until("document.querySelector('#schema-mark').textContent === '✓ valid'")
    shown.fill("#schema-text", "{")
    shown.click("#schema-run")
    assert "no JSON" in done(shown, "#schema-status")


VALIDATED = [
    ({"type": "integer", "minimum": 3}, 2, ["/: below minimum"]),
    ({"properties": {"a/b": {"type": "string"}}, "required": ["a/b", "c"]}, {"a/b": 1},
     ['/: lacks "c"', "/a~1b: expected string"]),
    ({"items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"pattern": "^a+$"}}}, ["aa", "b"],
     ["/1: does not match pattern"]),
    ({"additionalProperties": False, "properties": {}}, {"a": 1}, ["/a: nothing is allowed here"]),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, 1, ["/: does not fit one of oneOf"]),
    ({"prefixItems": [{"const": 1}], "items": {"const": 2}, "maxItems": 2}, [1, 2], []),
]  # fmt: skip


@needs_browser
@pytest.mark.parametrize(("schema", "value", "faults"), VALIDATED)
def test_the_mark_is_a_check(tab: Page, url: str, schema: object, value: object, faults: list[str]) -> None:
    if tab.value("typeof Validator") != "function":
        tab.open(url)
    found = tab.value(f"new Validator({json.dumps(schema)}).faults({json.dumps(value)})")
    assert found == faults


@needs_browser
def test_metrics(shown: Page, pictures: Path) -> None:
    shown.click("#tab-metrics")
    shown.until("metrics.before !== null")
    card = "[...document.querySelectorAll('.card')].map((c) => [c.querySelector('h2').textContent, \
c.querySelector('strong').textContent])"
    figures = dict(shown.value(card))
    assert figures["Running sequences"] == "0"
    assert figures["Pages used"].endswith(" %")
    shown.until("document.querySelectorAll('.card polyline')[0].getAttribute('points').split(' ').length > 1")
    assert dict(shown.value(card))["Generated tokens per second"] == "0"
    picture(shown, pictures, "metrics")
    shown.click("#tab-chat")
    assert shown.value("metrics.timer === null")


@needs_browser
def test_tabs_by_keyboard(shown: Page) -> None:
    shown.value("document.querySelector('#tab-chat').focus()")
    for tab in ("program", "schema", "metrics", "chat"):
        shown.press("ArrowRight", 39)
        assert shown.value("document.activeElement.id") == f"tab-{tab}"
        assert shown.value(f"!document.getElementById('{tab}').hidden")
        assert shown.value("document.querySelectorAll('[role=tabpanel]:not([hidden])').length") == 1
    unnamed = "[...document.querySelectorAll('input, textarea, select, button')].filter((e) => \
!e.labels?.length && !e.textContent && !e.ariaLabel).map((e) => e.outerHTML)"
    assert shown.value(unnamed) == []


@needs_browser
def test_a_key_is_asked_for_and_kept_in_the_tab(tab: Page, dummy_engine: Engine) -> None:
    with serving(dummy_engine, api_key=("open-sesame",)) as served:
        tab.complaints.clear()
        tab.open(served.url)
        tab.until("!document.querySelector('#key-form').hidden")
        assert "API key" in tab.text("#model")
        tab.fill("#key", "open-sesame")
        tab.press("Enter", 13)
        tab.until("!document.querySelector('#model').classList.contains('error')")
        assert tab.value("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
        tab.open(served.url)
        tab.until("document.querySelector('#model').textContent !== 'connecting'")
        assert tab.value("document.querySelector('#key-form').hidden")
        tab.call("Page.navigate", url="about:blank")
    assert all("401" in each for each in tab.complaints), tab.complaints
