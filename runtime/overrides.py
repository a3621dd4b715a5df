"""What may be changed while an engine runs, and how.

Owns the list of such fields and the check of a change: its name, type and range, and that the memory plan still holds.
Pure; the worker applies the result between two steps and keeps the records, which `server_info` and `stats` show.
A request that is refused changes nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, get_type_hints

import msgspec

from sgl.errors import ConfigError
from sgl.limits import Limits
from sgl.runtime.config import EngineConfig, ResolvedConfig, RuntimeOverride, wrong_value
from sgl.runtime.memory_plan import Sizes, largest, plan_memory, size_text

_STEP_FIELDS = ("max_running_requests", "chunked_prefill_size")
"""Sizes of a step; the memory plan holds for those that the engine started with, and must hold for others."""
_CONFIG_FIELDS = (*_STEP_FIELDS, "disable_overlap_schedule")
_LIMIT_FIELDS = ("max_queue", "max_queue_s")

OVERRIDABLE = (*_CONFIG_FIELDS, *_LIMIT_FIELDS, "log_level")
"""Fields that may change: sizes of a step, whether steps overlap, bounds of the queue, and what the worker logs."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What holds now."""

    config: ResolvedConfig
    limits: Limits
    log_level: str = "warning"

    def value(self, field: str) -> Any:
        """What holds now for a field of `OVERRIDABLE`."""
        if field in _CONFIG_FIELDS:
            return getattr(self.config, field)
        return getattr(self.limits, field) if field in _LIMIT_FIELDS else self.log_level


def override(
    settings: Settings, changes: Mapping[str, Any], *, why: str, at: float
) -> tuple[Settings, tuple[RuntimeOverride, ...]]:
    """The settings with `changes`, and a record of each.

    Args:
        changes: values by field of `OVERRIDABLE`.
        why: the reason, for whoever reads the records later.
        at: seconds since the epoch.

    Raises:
        ConfigError: a field that cannot change, a wrong value, a missing reason, or a step that would not fit in
            memory. Nothing changes then.
    """
    if not why.strip():
        raise ConfigError("an override needs a reason", hint="pass why='...'", param="why")
    checked = {field: _checked(field, value) for field, value in changes.items()}
    records = tuple(
        RuntimeOverride(field=field, value=value, was=settings.value(field), why=why, at=at)
        for field, value in checked.items()
    )
    step = {field: value for field, value in checked.items() if field in _CONFIG_FIELDS}
    bounds = {field: value for field, value in checked.items() if field in _LIMIT_FIELDS}
    config = msgspec.structs.replace(settings.config, **step)
    for field, value in step.items():
        if field in _STEP_FIELDS and value > getattr(settings.config, field):
            _check_memory(config, field)
    return (
        Settings(
            config=config,
            limits=msgspec.structs.replace(settings.limits, **bounds),
            log_level=checked.get("log_level", settings.log_level),
        ),
        records,
    )


def _checked(field: str, value: Any) -> Any:
    """The value, once it is clear that the field may change and takes it."""
    if field not in OVERRIDABLE:
        can = f"what can change is {', '.join(OVERRIDABLE)}"
        if field in EngineConfig.__struct_fields__:
            raise ConfigError(f"{field} is fixed while an engine runs", hint=f"start another one; {can}", param=field)
        near = difflib.get_close_matches(field, OVERRIDABLE, n=1)
        raise ConfigError(
            f"unknown engine option {field!r}", hint=f"did you mean {near[0]!r}?" if near else can, param=field
        )
    hints = get_type_hints(Limits if field in _LIMIT_FIELDS else EngineConfig, include_extras=True)
    try:
        if value is None:
            raise msgspec.ValidationError("expected a value, got None")
        return msgspec.convert(value, hints[field])
    except msgspec.ValidationError as error:
        raise wrong_value(field, value, error) from None


def _check_memory(config: ResolvedConfig, field: str) -> None:
    """Refuse a larger step for which there is no room beside what the engine holds already."""
    facts = config.facts
    if facts is None:
        return

    def fits(value: int) -> bool:
        changed = msgspec.structs.replace(config, **{field: value})
        return plan_memory(Sizes.of(changed), facts).fits

    value = getattr(config, field)
    if fits(value):
        return
    plan = plan_memory(Sizes.of(config), facts)
    most = largest(1, value, fits)
    raise ConfigError(
        f"{field} of {value} needs {size_text(plan.needed_bytes)}, more than may be used of "
        f"{size_text(plan.available_bytes)} available ({plan.available_source})",
        hint=f"set {field} to {most}" if most else "start an engine with a smaller max_total_tokens",
        param=field,
    )
