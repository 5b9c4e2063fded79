"""Which environment variables may be written into a report: an allow-list, no guess about what is harmless."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SHOWN = re.compile(r"(VLLM|NCCL|GLOO|UCX|CUDA|NVIDIA|OMP|TORCH|TORCHDYNAMO|TP|MASTER)_[A-Z0-9_]+|HF_HUB_OFFLINE")
_NEVER = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH")


def may_show(name: str) -> bool:
    """Return whether a variable's value may be written into a file."""
    return bool(_SHOWN.fullmatch(name)) and not _NEVER.search(name)


def shown(name: str, value: str | None) -> str:
    """Return a variable's value for a message: itself, ``unset``, or a word in place of what must not be shown."""
    if value is None:
        return "unset"
    return value if may_show(name) else "(not shown)"


def allowed(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that may be written into a file."""
    return {name: value for name, value in sorted(env.items()) if may_show(name)}
