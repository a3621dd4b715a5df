"""What a stranger gets: the wheel, and the wheel made from the sdist, installed outside the tree.

The four rooms are links in the repository and plain packages in a wheel; these tests are where that is seen. Each
package is built from a copy of the tree (a build writes beside the sources) and installed without dependencies into a
new environment, which borrows the heavy dependencies of the running one through a `.pth` file. An editable install of
`sgl` in the running environment is kept out: `.pth` files of a borrowed folder are not read.
"""

from __future__ import annotations

import email
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

import sgl

ROOMS = ("lang", "runtime", "kernels", "grammars")
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "build", "dist"
)


class Installed(NamedTuple):
    """A new environment with sgl in it."""

    bin: Path
    site: Path
    cwd: Path

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command of the environment, outside the tree, with nothing of the caller's Python settings."""
        env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
        done = subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            capture_output=True,
            text=True,
            cwd=self.cwd,
            env={**env, "NO_COLOR": "1"},
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done


def build(tree: Path, kind: str, out: Path) -> Path:
    """The one file that building `kind` in `tree` gives."""
    command = [sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", str(out), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [made] = out.iterdir()
    return made


@pytest.fixture(scope="module")
def sdist(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("sdist")
    shutil.copytree(root, base / "tree", symlinks=True, ignore=LEFT_OUT)
    return build(base / "tree", "sdist", base / "out")


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("wheel")
    shutil.copytree(root, base / "tree", symlinks=True, ignore=LEFT_OUT)
    return build(base / "tree", "wheel", base / "out")


@pytest.fixture(scope="module")
def wheel_of_sdist(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("wheel_of_sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(base, filter="data")
    [tree] = base.iterdir()
    return build(tree, "wheel", base / "out")


@pytest.fixture(scope="module")
def installed(wheel_of_sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    base = tmp_path_factory.mktemp("installed")
    venv.create(base / "env", with_pip=False, symlinks=True)
    bin_folder = base / "env" / "bin"
    where = subprocess.run(
        [str(bin_folder / "python"), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    site = Path(where.stdout.strip())
    pip = [sys.executable, "-m", "pip", "--python", str(bin_folder / "python"), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--no-compile", str(wheel_of_sdist)], check=True)
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "borrowed.pth").write_text("".join(f"{folder}\n" for folder in sorted(borrowed)))
    cwd = base / "elsewhere"
    cwd.mkdir()
    return Installed(bin_folder, site, cwd)


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_wheel_holds_one_package(wheel: Path) -> None:
    names = names_in(wheel)
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"sgl"}
    assert len(names) == len(set(names))


def test_wheel_holds_every_source_file_once(wheel: Path, root: Path) -> None:
    expected = {f"sgl/{path.relative_to(root).as_posix()}" for room in ROOMS for path in (root / room).rglob("*.py")}
    expected |= {path.relative_to(root).as_posix() for path in (root / "sgl").rglob("*.py") if path.resolve() == path}
    assert {name for name in names_in(wheel) if name.endswith(".py")} == expected


def test_every_data_file_is_declared(wheel: Path, root: Path) -> None:
    """Whatever lies in a room and is not Python or documentation has to be in the wheel."""
    data = {
        path.relative_to(root).as_posix()
        for folder in (*ROOMS, "sgl")
        for path in (root / folder).rglob("*")
        if path.is_file() and path.resolve() == path and path.suffix not in (".py", ".pyc", ".md")
    }
    assert "sgl/py.typed" in data
    packed = set(names_in(wheel))
    assert not {name if name.startswith("sgl/") else f"sgl/{name}" for name in data} - packed


def test_wheel_of_sdist_is_the_wheel(wheel: Path, wheel_of_sdist: Path) -> None:
    assert sorted(names_in(wheel)) == sorted(names_in(wheel_of_sdist))


def test_metadata(wheel: Path, root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    assert (metadata["Name"], metadata["License-Expression"]) == ("sgl", "Apache-2.0")
    assert metadata["Requires-Python"] == project["requires-python"]
    assert any(name.endswith("licenses/LICENSE") for name in names_in(wheel))


def test_only_sgl_is_installed(installed: Installed) -> None:
    names = {path.name for path in installed.site.iterdir()} - {"borrowed.pth", "__pycache__"}
    assert {name.split("-")[0] for name in names} == {"sgl"}


def test_import_comes_from_the_installed_files(installed: Installed) -> None:
    code = "import sgl, sgl.lang.graph, sgl.runtime.config; print(sgl.__file__, sgl.lang.graph.__file__)"
    for path in installed.run("python", "-c", code).stdout.split():
        assert Path(path).is_relative_to(installed.site)
        assert not Path(path).is_symlink()


def test_data_is_read_back(installed: Installed) -> None:
    code = (
        "from importlib.resources import files\nprint(all((files('sgl') / name).is_file() for name in ('py.typed',)))\n"
    )
    assert installed.run("python", "-c", code).stdout.strip() == "True"


def test_command_says_its_version(installed: Installed) -> None:
    assert installed.run("sgl", "--version").stdout == f"sgl {sgl.__version__}\n"


def test_doctor_runs(installed: Installed) -> None:
    report = json.loads(installed.run("sgl", "doctor", "--model-path", "dummy", "--json").stdout)
    assert Path(report["location"]).is_relative_to(installed.site)
    assert report["kernels"]
    assert report["model"]["resolved"]["num_pages"] > 0


PROGRAM = """
import sys

import sgl


@sgl.function
def two(s, start):
    s += start + sgl.gen("a", max_tokens=4, temperature=0, ignore_eos=True)
    s += " then " + sgl.select("b", choices=["x", "y"])


state = two.run(start=sys.argv[1])
print(state.text()[:4], state.get_meta_info("a")["completion_tokens"], state["b"] in ("x", "y"))
"""


def test_program_on_the_dummy_model(installed: Installed) -> None:
    program = installed.cwd / "program.py"
    program.write_text(PROGRAM)
    done = installed.run("sgl", "run", "--model-path", "dummy", "program.py", "Once")
    assert done.stdout.split() == ["Once", "4", "True"]
