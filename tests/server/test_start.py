"""What is wrong with a server's options is said before a model is loaded, about what the operator wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sgl.cli import app
from sgl.errors import ConfigError
from sgl.server.config import ServerConfig, server_config
from sgl.server.serve import serve


@pytest.mark.parametrize("name", ["tool_call_parser", "reasoning_parser"])
def test_parsers_that_there_are_not(name: str) -> None:
    with pytest.raises(ConfigError, match="'xx' is unknown"):
        server_config({name: "xx"})


def test_a_file_may_give_one_key_as_text(tmp_path: Path) -> None:
    assert server_config({"api_key": "k"}).api_key == ("k",)
    file = tmp_path / "serve.toml"
    file.write_text('api_key = "k"\nmax_running_requests = 3\n')
    shown = CliRunner().invoke(app, ["serve", "dummy", "--config", str(file), "--print-config"])
    assert json.loads(shown.stdout)["server"]["api_key"] == "***"


def test_a_slip_in_a_file_is_told_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("prt = 1\n")
    failed = CliRunner().invoke(app, ["serve", "dummy", "--config", str(file), "--print-config"])
    assert failed.exit_code == 2
    assert "did you mean 'port'" in failed.output
    assert "serve.toml" in failed.output.replace("\n", "")


def test_two_models_are_one_too_many() -> None:
    failed = CliRunner().invoke(app, ["serve", "dummy", "--model-path", "other", "--print-config"])
    assert (failed.exit_code, "--model-path is 'other'" in failed.output) == (2, True)


@pytest.mark.parametrize(
    ("config", "param"),
    [
        (ServerConfig(uds="/nonexistent/a.sock"), "uds"),
        (ServerConfig(host="300.1.1.1"), "host"),
    ],
)
def test_addresses_that_cannot_be(config: ServerConfig, param: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen on") as failure:
        serve(config, {"model_path": "dummy"}, print)
    assert failure.value.details["param"] == param


def test_a_value_out_of_range_is_told_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"server option port: Expected"):
        server_config({"port": 99999})
