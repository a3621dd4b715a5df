"""What a model recommends for sampling: `generation_config.json` beside its weights.

Owns the reading of that file into fields of `Sampling`. The engine reports them (`Engine.sampling_defaults`), and the
language and `Engine.generate` put them below every explicit value, once. With `sampling_defaults="openai"` none are
read, and the constants of `Sampling` hold.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sgl.errors import ConfigError, InvalidParameter
from sgl.lang.graph import sampling_from_mapping
from sgl.runtime.loading.folder import json_object

FILE = "generation_config.json"
FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What is taken from the file; the rest of it says how Hugging Face's own loop runs."""


def model_defaults(folder: Path | None) -> dict[str, Any]:
    """The fields of `Sampling` that the model's folder sets; none without a folder or the file.

    Raises:
        CorruptModel: the file is no JSON object.
        ConfigError: a value in it is out of range.

    Example:
        >>> model_defaults(None)
        {}
    """
    if folder is None:
        return {}
    found = json_object(folder, FILE)
    defaults = {name: found[name] for name in FIELDS if found.get(name) is not None}
    if defaults.get("top_k") == 0:  # how Hugging Face switches it off
        defaults["top_k"] = -1
    try:
        sampling = sampling_from_mapping(defaults)
    except InvalidParameter as error:
        raise ConfigError(
            f"{folder / FILE}: {error}",
            hint="mend it, or set sampling_defaults to openai",
            param="sampling_defaults",
        ) from None
    return {name: getattr(sampling, name) for name in defaults}
