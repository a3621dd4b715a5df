"""Custom logit processors for tests, which an engine imports by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def always(logits: torch.Tensor, output_ids: Sequence[int], params: Any) -> torch.Tensor:
    """Allow only the id `params`."""
    changed = torch.full_like(logits, -torch.inf)
    changed[params] = 0.0
    return changed
