"""What `import sgl` and the command line load, listed in fresh processes. No times: modules are counted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "transformers", "numpy", "llguidance", "tokenizers", "gguf", "safetensors", "huggingface_hub"}
WORKER_ONLY = {"torch", "transformers", "gguf", "llguidance", "safetensors"}
GENERIC = {"lang", "runtime", "kernels", "grammars"}


def modules_after(code: str, cwd: Path = ROOT) -> set[str]:
    """Top-level names in `sys.modules` of a new interpreter that ran `code` in `cwd`."""
    tail = "\nimport json, sys\nprint(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", code + tail], capture_output=True, text=True, cwd=cwd, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("code", ["import sgl", "import sgl.cli", "import sgl\nsgl.gen('x')\nsgl.function"])
def test_import_loads_nothing_heavy(code: str) -> None:
    assert not modules_after(code) & HEAVY


def test_client_half_runs_without_torch() -> None:
    loaded = modules_after("import sgl\nsgl.Engine\nimport sgl.runtime.messages, sgl.runtime.stats, sgl.runtime.config")
    assert not loaded & WORKER_ONLY


def test_no_generic_name_after_importing_everything() -> None:
    code = (
        "import importlib, pkgutil, sgl\n"
        "for found in pkgutil.walk_packages(sgl.__path__, 'sgl.'):\n"
        "    if not found.name.endswith('__main__'):\n"
        "        importlib.import_module(found.name)\n"
    )
    loaded = modules_after(code)
    assert not loaded & GENERIC
    assert "torch" in loaded, "the walk did not reach the rooms"


def test_transformers_works_from_the_repository_root() -> None:
    """A top-level `kernels` would be taken for the package of that name, which transformers looks for."""
    code = (
        "import torch\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,"
        " num_attention_heads=2, num_key_value_heads=1)\n"
        "with torch.no_grad():\n"
        "    logits = LlamaForCausalLM(config)(torch.tensor([[1, 2, 3]])).logits\n"
        "if logits.shape != (1, 3, 16):\n"
        "    raise SystemExit(logits.shape)\n"
    )
    assert not modules_after(code, cwd=ROOT) & {"sgl"}
