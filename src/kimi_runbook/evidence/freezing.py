"""Freezing: parts go to files and a manifest, redacted, scanned, hashed; a folder is replaced as a whole."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kimi_runbook.errors import RunbookError
from kimi_runbook.evidence.exceptions import first_exception
from kimi_runbook.evidence.redactor import FORMATS, Redactor
from kimi_runbook.evidence.scan import scan_text
from kimi_runbook.reading import Fields

MANIFEST = "manifest.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One piece of evidence as it came from the host, not redacted.

    Attributes:
        name: File it goes to.
        text: What was found, None when it could not be had.
        reason: Why it could not be had.
        form: ``text``, ``json``, ``yaml`` or ``env``.
        notes: In what way it is partial, e.g. cut at its size, ended at its time limit; empty when it is whole.
        skipped: Whether there was nothing to ask for on this host, e.g. no Kubernetes; then ``reason`` says what was
            looked for, and the evidence is not partial for it.
    """

    name: str
    text: str | None
    reason: str = ""
    form: str = "text"
    notes: tuple[str, ...] = ()
    skipped: bool = False

    @staticmethod
    def from_json(value: object) -> Part:
        """Read one row of what node_evidence returns.

        Raises:
            RunbookError: the row has another shape, a file name that is none, or an unknown format.
        """
        row = Fields(value, "evidence part", "Correct evidence_extra_parts.")
        name, form = row.text("name"), row.optional_text("format") or "text"
        if not _NAME.fullmatch(name) or name == MANIFEST:
            raise _wrong(name, "a file name of letters, digits, dot, dash and underscore that is not manifest.json")
        if form not in FORMATS:
            raise _wrong(f"{name}: format {form}", f"one of {', '.join(FORMATS)}")
        return Part(
            name=name,
            text=row.optional_text("text"),
            reason=row.optional_text("reason") or "",
            form=form,
            notes=row.texts("notes"),
            skipped=row.flag("skipped", False),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """What was written, and what was not.

    Attributes:
        kept: Names of the files.
        missing: Name to reason: not to be had, or held back by the scan.
        skipped: Name to reason: nothing to ask for on this host.
        notes: Name to the ways in which a file is partial.
    """

    kept: tuple[str, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def freeze(folder: Path, parts: Sequence[Part], redactor: Redactor) -> Frozen:
    """Write every part and a manifest into a folder; what was there before is replaced, whole or not at all.

    Parts are written in the order given. A part that the secret scan finds anything in is not written; the manifest
    names it with line numbers and rules.

    Raises:
        RunbookError: two parts have one name, or the folder cannot be written.
    """
    names = [part.name for part in parts]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise _wrong(f"{', '.join(twice)} twice", "one part per name")
    texts = redactor.redact_all({part.name: (part.text, part.form) for part in parts if part.text is not None})
    contents = {name: text.rstrip("\n") + "\n" for name, text in texts.items()}
    held = {name: reason for name, text in contents.items() if (reason := _held_back(name, text))}
    kept = {name: text for name, text in contents.items() if name not in held}
    reasons = {part.name: redactor.follow(redactor.redact(part.reason)) for part in parts if part.text is None}
    notes = {part.name: tuple(redactor.follow(redactor.redact(note)) for note in part.notes) for part in parts}
    frozen = Frozen(
        kept=tuple(kept),
        missing={part.name: reasons[part.name] for part in parts if part.name in reasons and not part.skipped} | held,
        skipped={part.name: reasons[part.name] for part in parts if part.name in reasons and part.skipped},
        notes={name: texts for name, texts in notes.items() if texts and name in kept},
    )
    manifest = json.dumps(_manifest(frozen, kept), indent=2, sort_keys=True) + "\n"
    if scan_text(manifest, MANIFEST):  # a reason may quote what a command printed
        manifest = json.dumps(_manifest(_without_reasons(frozen), kept), indent=2, sort_keys=True) + "\n"
    try:
        _replace(folder, {**kept, MANIFEST: manifest})
    except OSError as error:
        raise RunbookError(
            where=str(folder),
            observed=f"evidence cannot be written ({error.strerror})",
            expected="a folder that can be written to, with room",
            next_step="Free space or set runs_dir, then run diagnose again.",
        ) from error
    return frozen


def _held_back(name: str, text: str) -> str:
    findings = scan_text(text, name)
    if not findings:
        return ""
    places = "; ".join(f"line {finding.line} ({finding.rule})" for finding in findings[:5])
    more = f" and {len(findings) - 5} more" if len(findings) > 5 else ""
    return (
        f"held back by the secret scan: {name} {places}{more}. Look at it on the host, and report what redaction let "
        "through"
    )


def _manifest(frozen: Frozen, kept: Mapping[str, str]) -> dict[str, object]:
    found = {name: first_exception(text) for name, text in kept.items() if name.endswith(".log")}
    return {
        "schema_version": 1,
        "partial": bool(frozen.missing or frozen.notes),
        "sha256": {name: hashlib.sha256(_bytes(text)).hexdigest() for name, text in kept.items()},
        "bytes": {name: len(_bytes(text)) for name, text in kept.items()},
        "missing": dict(frozen.missing),
        "skipped": dict(frozen.skipped),
        "notes": {name: list(notes) for name, notes in frozen.notes.items()},
        "first_exception": {name: first.to_json() for name, first in found.items() if first is not None},
        "order": list(kept),
    }


def _without_reasons(frozen: Frozen) -> Frozen:
    silent = "the reason was held back by the secret scan; look at the host"
    return Frozen(
        kept=frozen.kept,
        missing=dict.fromkeys(frozen.missing, silent),
        skipped=dict.fromkeys(frozen.skipped, silent),
        notes=dict.fromkeys(frozen.notes, (silent,)),
    )


def _replace(folder: Path, files: Mapping[str, str]) -> None:
    """Put a new folder in the place of an old one: written beside it, then renamed.

    A run killed on the way leaves either folder whole; its remains are used or removed by the next.
    """
    new, old = folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
    if old.exists() and not folder.exists():  # killed between the two renames
        old.rename(folder)
    for remains in (new, old):
        if remains.exists():
            shutil.rmtree(remains)
    new.mkdir(parents=True)
    for name, text in files.items():
        (new / name).write_bytes(_bytes(text))
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    if old.exists():
        shutil.rmtree(old)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _wrong(observed: str, expected: str) -> RunbookError:
    return RunbookError(
        where="evidence parts", observed=observed, expected=expected, next_step="Correct evidence_extra_parts."
    )
