"""Takes the README's pictures from a real run, with the Chromium that is installed: `python .ci/pictures.py`.

Owns `tutorials/pictures/`. The tree page is that of the fork program of tutorial 5, run on the embedded model; the
playground is that of `sgl serve`, after its first program has run there. The suite checks that both are small.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.browser import Page, browsing, chromium  # noqa: E402

PICTURES = ROOT / "tutorials" / "pictures"
TUTORIAL = ROOT / "tutorials" / "05_fork_and_join.py"


def main() -> None:
    """Write every picture."""
    if chromium() is None:
        sys.exit("pictures: no Chromium found; install the package chromium")
    PICTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, browsing(Path(name)) as page:
        folder = Path(name)
        subprocess.run([sys.executable, "-m", "sgl.cli", "run", str(TUTORIAL)], cwd=folder, check=True)
        page.open((folder / "tree.html").as_uri(), width=1000, height=680)
        take(page, "tree.png")
        with served() as url:
            show_program(page, url)
        take(page, "playground.png")


@contextmanager
def served() -> Iterator[str]:
    """The address of a server on the embedded model."""
    command = [sys.executable, "-m", "sgl.cli", "serve", "--port", "0", "--no-log-requests"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            yield next(line.split(" on ")[1].strip() for line in server.stderr if line.startswith("sgl is ready"))
        finally:
            server.terminate()


def show_program(page: Page, url: str) -> None:
    """Run the program that the playground begins with."""
    page.open(url, width=940, height=600)
    page.until("document.querySelector('#model').textContent !== 'connecting'")
    page.click("#tab-program")
    page.click("#program-run")
    page.until("!['', 'running'].includes(document.querySelector('#program-status').textContent)")
    page.value("document.querySelector('#program-output').scrollIntoView({block: 'end'})")


def take(page: Page, name: str) -> None:
    """Keep what the window shows."""
    page.screenshot(PICTURES / name)
    sys.stdout.write(f"{name}: {(PICTURES / name).stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
