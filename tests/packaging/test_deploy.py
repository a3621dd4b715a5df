"""The files of `deploy/`, linted: what they name exists, and the habits that keep a service out of trouble are kept."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import sgl
from sgl.runtime.config import EngineConfig
from sgl.server import health
from sgl.server.config import ServerConfig

FOLDER = Path(__file__).resolve().parents[2] / "deploy"
ROOT = FOLDER.parent
OPTIONS = {*EngineConfig.__struct_fields__, *ServerConfig.__struct_fields__}
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile as (instruction, rest), continuations joined, without comments."""
    text = re.sub(r"^#.*\n", "", (FOLDER / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines if line.strip()]


def all_of(instruction: str) -> list[str]:
    """What stands behind each instruction of that name."""
    return [rest for name, rest in instructions() if name == instruction]


def check_arguments(arguments: list[str]) -> None:
    """Every `--flag` is an option of the server or the engine."""
    for argument in arguments:
        if argument.startswith("--"):
            assert argument.removeprefix("--").split("=")[0].replace("-", "_") in OPTIONS, argument


def check_variables(names: list[str]) -> None:
    """Every `SGL_*` variable is one of those, or the cache."""
    for name in names:
        if name.startswith("SGL_"):
            assert name == "SGL_CACHE" or name.removeprefix("SGL_").lower() in OPTIONS, name


def seconds(text: str) -> int:
    """`45s`, `10m` in seconds."""
    return int(text[:-1]) * {"s": 1, "m": 60}[text[-1]]


def test_image() -> None:
    names = [name for name, _ in instructions()]
    [base] = all_of("FROM")
    assert re.fullmatch(r"[\w/.-]+:[\w.-]*\d[\w.-]*", base), "the base has a version"
    assert "latest" not in base
    [user] = all_of("USER")
    assert int(user) > 0, "a number, so that Kubernetes can tell that it is not root"
    assert names.index("USER") > max(i for i, name in enumerate(names) if name == "RUN")
    assert "ADD" not in names
    for command in all_of("RUN"):
        assert "sudo" not in command
        if "apt-get install" in command:
            assert "--no-install-recommends" in command
            assert command.startswith("apt-get update")
            assert command.endswith("rm -rf /var/lib/apt/lists/*")
        if "pip install" in command:
            assert "--no-cache-dir" in command
            assert "--constraint" in command
    for form in (*all_of("ENTRYPOINT"), *all_of("CMD")):
        assert form.startswith("["), "exec form: signals reach the server"
    check_arguments(yaml.safe_load(all_of("CMD")[0]))
    [check] = all_of("HEALTHCHECK")
    assert "/health/ready" in check
    assert set(all_of("STOPSIGNAL")) == {"SIGTERM"}


def test_image_has_what_it_copies_and_nothing_else() -> None:
    kept = {line[1:] for line in (FOLDER / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"}
    copied = {source for rest in all_of("COPY") for source in rest.split()[:-1]}
    assert copied == kept
    assert all((ROOT / source).exists() for source in copied)
    # What `sgl/` links to is there too.
    assert {link.name for link in (ROOT / "sgl").iterdir() if link.is_symlink()} <= copied


def test_compose() -> None:
    whole = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    service = whole["services"]["sgl"]
    assert (FOLDER / service["build"]["context"] / service["build"]["dockerfile"]).exists()
    assert set(service["build"]["args"]) == {arg.split("=")[0] for arg in all_of("ARG")}
    assert service["image"] == f"sgl:{sgl.__version__}"
    check_variables(list(service["environment"]))
    assert service["environment"]["SGL_API_KEY"].startswith("${SGL_API_KEY:?"), "no start without a key"
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert {volume.split(":")[0] for volume in service["volumes"]} == set(whole["volumes"])
    assert {volume.split(":")[1] for volume in service["volumes"]} == set(all_of("VOLUME"))
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert seconds(service["stop_grace_period"]) > ServerConfig().drain


def test_kubernetes() -> None:
    objects = {each["kind"]: each for each in yaml.safe_load_all((FOLDER / "kubernetes/sgl.yaml").read_text())}
    assert set(objects) == {"Deployment", "Service", "PersistentVolumeClaim", "PodDisruptionBudget"}
    deployment = objects["Deployment"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    for selector in (
        deployment["selector"]["matchLabels"],
        objects["Service"]["spec"]["selector"],
        objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector == labels
    pod = deployment["template"]["spec"]
    [container] = pod["containers"]
    assert container["image"] == f"sgl:{sgl.__version__}"
    check_arguments(container["args"])
    check_variables([variable["name"] for variable in container["env"]])
    assert not [v for v in container["env"] if "KEY" in v["name"] and "value" in v], "keys come from secrets"
    assert pod["securityContext"]["runAsUser"] == int(all_of("USER")[0])
    assert pod["terminationGracePeriodSeconds"] > ServerConfig().drain + 5
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    claims = [volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"] if volume["name"] == "cache"]
    assert claims == [objects["PersistentVolumeClaim"]["metadata"]["name"]]
    ports = {port["name"] for port in container["ports"]}
    assert objects["Service"]["spec"]["ports"][0]["targetPort"] in ports


def test_probes() -> None:
    """Each asks an open route, waits longer than the server does, and a slow start is no failure."""
    [deployment, *_] = yaml.safe_load_all((FOLDER / "kubernetes/sgl.yaml").read_text())
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    probes: dict[str, Any] = {name: container[name] for name in PROBES}
    source = Path(health.__file__).read_text()
    open_routes = set(re.findall(r'routes\.get\("([\w/]+)", "open"\)', source))
    assert {probe["httpGet"]["path"] for probe in probes.values()} <= open_routes
    assert probes["livenessProbe"]["httpGet"]["path"] == "/health/live", "a pod that drains is not restarted"
    assert probes["readinessProbe"]["httpGet"]["path"] == "/health/ready"
    assert all(probe["timeoutSeconds"] > health.PROBE_S for probe in probes.values())
    startup = probes["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 600


def unit() -> dict[str, list[str]]:
    """Settings of the systemd unit."""
    found: dict[str, list[str]] = {}
    for line in (FOLDER / "sgl.service").read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def test_systemd_unit() -> None:
    settings = unit()
    [command] = settings["ExecStart"]
    words = shlex.split(command)
    assert words[0].startswith("/")
    assert words[1] == "serve"
    check_arguments(words)
    check_variables([line.split("=")[0] for line in settings["Environment"]])
    assert int(settings["TimeoutStopSec"][0]) > ServerConfig().drain
    assert settings["DynamicUser"] == ["yes"]
    assert settings["Environment"] == [f"SGL_CACHE=/var/cache/{settings['CacheDirectory'][0]}"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """Its own check, on a unit whose program is one that exists."""
    text = (FOLDER / "sgl.service").read_text().replace("/usr/lib/sgl/bin/sgl", "/bin/true")
    (tmp_path / "sgl.service").write_text(text)
    command = ["systemd-analyze", "verify", str(tmp_path / "sgl.service")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Unknown" not in done.stderr


def test_readme_names_every_file() -> None:
    named = set(re.findall(r"`([\w./]+)`", (FOLDER / "README.md").read_text()))
    there = {str(file.relative_to(FOLDER)) for file in FOLDER.rglob("*") if file.is_file()}
    assert there - {"README.md"} <= named
