"""Pages of runs and plans: what they show, that nothing gets out of its place, and how a browser sees them."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import sgl
from sgl.errors import GenerationError
from sgl.lang import record
from sgl.lang.view.page import element

if TYPE_CHECKING:
    from sgl.runtime.engine import Engine

HOSTILE = "</span><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">&amp;'\"\0\ud800"


class Parsed(HTMLParser):
    """A page as a browser reads it: elements, text, and classes of the text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.spans: list[tuple[str, str, str]] = []
        self.text = ""
        self._open: list[dict[str, str | None]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta",):
            self._open.append(dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data
        last = self._open[-1] if self._open else {}
        self.spans.append((data, last.get("class") or "", last.get("title") or ""))

    def kinds(self, kind: str) -> str:
        return "".join(text for text, classes, _ in self.spans if kind in classes.split())


@sgl.function
def essay(s, topic):
    s += sgl.user("Write about " + topic)
    forks = s.fork(2)
    forks += sgl.assistant_begin() + sgl.gen(
        "draft", max_tokens=5, regex="[a-z]{5}", temperature=0, return_logprob=True
    )
    forks.join()
    s += sgl.assistant("So: " + s["draft"][0] + sgl.select("verdict", choices=["good", "bad"]))


def test_a_run_shows_where_its_text_comes_from(dummy_engine: Engine):
    dummy_engine.flush_cache(wait_s=10.0)
    state = essay.run("tea", backend=dummy_engine)
    page = Parsed(state.to_html())
    assert page.kinds("generated") == "generated" + "".join(state["draft"])  # the key says what the colour is
    assert page.kinds("select") == "select" + state["verdict"]
    assert "Write about tea" in page.kinds("prompt") + page.kinds("cached")
    assert page.kinds("cached").removeprefix("cached") != ""  # the second fork finds what the first computed
    assert any(re.match(r"\d+\.\d %", title) for _, classes, title in page.spans if "token" in classes)
    assert any("% 'good'" in title and "% 'bad'" in title for _, _, title in page.spans)
    assert page.tags.count("details") == 3
    assert essay.last_run is not None
    assert essay.last_run.to_html() == state.to_html()
    assert "<html" not in state._repr_html_()
    again = Parsed(essay.run("tea", backend=dummy_engine).to_html())
    assert "Write about tea" in again.kinds("cached")  # before the fork: what its branches tell


def test_forced_tokens_have_a_colour_of_their_own(dummy_engine: Engine):
    @sgl.function
    def forced(s):
        s += "It is " + sgl.gen("x", regex="(certainly|certain) [ab]", max_tokens=20, temperature=0)

    state = forced.run(backend=dummy_engine)
    page = Parsed(state.to_html())
    assert page.kinds("forced").startswith("forcedcertain")
    assert page.kinds("forced").removeprefix("forced") + page.kinds("generated").removeprefix("generated") != ""
    assert len(page.kinds("generated").removeprefix("generated")) + len(
        page.kinds("forced").removeprefix("forced")
    ) == len(state["x"])


def hostile_state() -> sgl.ProgramState:
    @sgl.function
    def program(s, text):
        s += sgl.user(text) + sgl.assistant(sgl.gen(text, max_tokens=500))
        s += sgl.select("pick", choices=[text, "b"])

    return program.run(HOSTILE, backend=sgl.MockBackend([HOSTILE], choices={"pick": HOSTILE}))


def test_what_a_model_writes_is_never_markup():
    for page in (hostile_state().to_html(), essay.explain(HOSTILE, backend=sgl.MockBackend()).to_html()):
        parsed = Parsed(page)
        assert {"script", "img"} & set(parsed.tags) == set()
        assert not any(name.startswith("on") for name, _ in parsed.attributes)
        assert "<script>document.title=" in parsed.text
        assert {"src", "href", "action", "data"} & {name for name, _ in parsed.attributes} == set()
        assert not re.search(r"https?:|url\(|@import", page)
        page.encode("utf-8")
    assert element("p", "<", element("b", "&"), title='"') == '<p title="&quot;">&lt;<b>&amp;</b></p>'


def test_a_failure_is_shown_with_its_line():
    @sgl.function
    def failing(s):
        s += "Before " + sgl.gen("x")

    with pytest.raises(GenerationError):
        failing.run(backend=sgl.MockBackend(errors={"x": GenerationError("no luck")}))
    page = Parsed(failing.last_run.to_html())
    assert "GenerationError: no luck" in page.text
    assert "in failing" in page.text
    assert "x: nothing came" in page.text


def test_a_record_does_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(record, "MAX_NODES", 10)

    @sgl.function
    def long(s):
        for i in range(20):
            s += f"{i} " + sgl.gen(f"x{i}")
            s[f"x{i}"]

    long.run(backend=sgl.MockBackend())
    assert len(long.last_run.nodes) == 10
    assert "too long to be kept whole" in long.last_run.to_html()


def browser() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(browser() is None, reason="no Chromium here")
def test_a_browser_shows_the_page_and_runs_nothing(tmp_path: Path):
    (tmp_path / "run.html").write_text(hostile_state().to_html(), encoding="utf-8")
    command = [
        str(browser()), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", (tmp_path / "run.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    dom = Parsed(done.stdout)
    assert "<title>Run of program</title>" in done.stdout
    assert "script" not in dom.tags
    assert "<script>document.title='owned'</script>" in dom.text
    assert dom.kinds("generated").startswith("generated</span><script>")
