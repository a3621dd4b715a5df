"""Takes the README's pictures from a real run, with the Chromium that is installed: `python .ci/pictures.py`.

Owns `tutorials/pictures/`. The tree page is that of the fork program of tutorial 5, run on the embedded model. Nothing
in the suite needs a browser; it checks that the pictures are there and small.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "tutorials" / "pictures"
TUTORIAL = ROOT / "tutorials" / "05_fork_and_join.py"
SIZE = (1000, 760)


def main() -> None:
    """Write every picture."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("pictures: no Chromium found; install the package chromium")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "sgl.cli", "run", str(TUTORIAL)], cwd=folder, check=True)
        take(browser, Path(folder) / "tree.html", PICTURES / "tree.png")


def take(browser: str, page: Path, picture: Path) -> None:
    """A picture of a page."""
    picture.parent.mkdir(parents=True, exist_ok=True)
    size = ",".join(map(str, SIZE))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={size}"]
    subprocess.run([*command, f"--screenshot={picture}", page.as_uri()], check=True, capture_output=True)
    sys.stdout.write(f"{picture.relative_to(ROOT)}: {picture.stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
