"""Evidence: what explains a failure, kept with its hash, without secrets, and honest about what is missing."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Values of names that promise a secret, bearer headers, and passwords inside URLs. Patterns err on the side of
# blotting out too much; the names stay, so that a reader sees that something was set.
_SECRETS = (
    re.compile(
        r"(?i)(\b[\w.-]*(?:token|secret|passw(?:or)?d|api[_-]?key|credential)[\w.-]*[\"']?\s*[=:]\s*[\"']?)([^\s\"',}]+)"
    ),
    re.compile(r"(?i)(\bauthorization:?\s+(?:bearer|basic)\s+|\bbearer\s+)(\S+)"),
    re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s/:@]+:)([^\s/@]+)(?=@)"),
    re.compile(r"()(\bhf_[A-Za-z0-9]{20,}|\bsk-[A-Za-z0-9_-]{20,})"),
)


def redact(text: str) -> str:
    """Return the text with every value that looks like a secret replaced by ``[redacted]``."""
    for pattern in _SECRETS:
        text = pattern.sub(r"\1[redacted]", text)
    return text


def freeze(folder: Path, parts: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Write each part and a manifest; return the names kept and the names missing.

    Args:
        folder: Where the files go; made when it is not there.
        parts: ``name``, ``text`` (None when it could not be had) and ``reason``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept: dict[str, str] = {}
    missing: dict[str, str] = {}
    for part in parts:
        if part["text"] is None:
            missing[part["name"]] = redact(str(part["reason"]))
            continue
        content = (redact(str(part["text"])) + "\n").encode()
        (folder / part["name"]).write_bytes(content)
        kept[part["name"]] = hashlib.sha256(content).hexdigest()
    manifest = {"schema_version": 1, "partial": bool(missing), "sha256": kept, "missing": missing}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return list(kept), list(missing)
