"""Version strings of drivers and packages: parse, compare, and name the branch. Pure, and it knows no package by name.

Grammar, with where it was read:

=================  =====================================  ==================================================
kind               form                                   source
=================  =====================================  ==================================================
driver             two or three numbers, ``595.84`` and   packages.ubuntu.com, nvidia-dkms-595; NVIDIA's
                   ``580.126.20``; the first is the       "Driver Lifecycle" for the branch
                   branch
Debian package     ``[epoch:]upstream[-revision]``, the   Debian policy 5.6.12; deb-version(7)
                   revision after the last hyphen
RPM package        ``[epoch:]version[-release]``;         rpm-version(7); NVIDIA's driver packages carry
                   ``~`` sorts before, ``^`` after        epoch 3 (``3:580.95.05-1.el9``)
=================  =====================================  ==================================================

Numbers compare as numbers (``580.95.05`` is older than ``580.126.20``), so sorting the text is always wrong.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

Scheme = Literal["deb", "rpm"]
"""Whose rules order two versions."""

_Key: TypeAlias = tuple[tuple[object, ...], ...]

_FULL = re.compile(r"(?:(?P<epoch>\d+):)?(?P<rest>[A-Za-z0-9][A-Za-z0-9.+~^_:-]*)")
_DRIVER = re.compile(r"\d+(?:\.\d+){1,2}")
_DEB_PART = re.compile(r"(\D*)(\d*)")
_RPM_PART = re.compile(r"[0-9]+|[A-Za-z]+|[~^]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """One version as its package manager writes it.

    Attributes:
        epoch: The number before the colon; None where none is written, which both package managers read as 0.
        upstream: What the software calls itself, e.g. ``580.178.04``.
        revision: Debian revision or RPM release, e.g. ``1ubuntu1`` or ``1.el9``; None where none is written.
    """

    epoch: int | None
    upstream: str
    revision: str | None

    def __str__(self) -> str:
        epoch = "" if self.epoch is None else f"{self.epoch}:"
        return f"{epoch}{self.upstream}" + ("" if self.revision is None else f"-{self.revision}")


def parse(text: str) -> Version:
    """Return the parts of a version; ValueError when it has a character no version has, or nothing in a part."""
    match = _FULL.fullmatch(text)
    if match is None or (match["epoch"] is None and ":" in match["rest"]):
        raise ValueError(f"{text!r} is no version")
    upstream, hyphen, revision = match["rest"].rpartition("-")
    if hyphen and (not upstream or not revision):
        raise ValueError(f"{text!r} is no version")
    epoch = None if match["epoch"] is None else int(match["epoch"])
    return Version(epoch=epoch, upstream=upstream if hyphen else match["rest"], revision=revision if hyphen else None)


def upstream_of(text: str) -> str:
    """Return a version without epoch and revision: ``3:580.95.05-1.el9`` gives ``580.95.05``. ValueError as parse."""
    return parse(text).upstream


def is_driver_version(text: str) -> bool:
    """Whether the text is a driver version and nothing more: two or three numbers."""
    return _DRIVER.fullmatch(text) is not None


def branch_of(text: str) -> str:
    """Return the driver branch, e.g. ``580``, of a driver's version or of one of its packages.

    Raises:
        ValueError: The upstream part is not two or three numbers.
    """
    upstream = upstream_of(text)
    if not is_driver_version(upstream):
        raise ValueError(f"{text!r} is no driver version: expected two or three numbers, e.g. 580.178.04")
    return upstream.partition(".")[0]


def same_build(observed: str, wanted: str) -> bool:
    """Whether an installed version is the wanted one, comparing only what the wanted one names.

    An epoch or revision that ``wanted`` leaves out is left out of the comparison: ``3:580.95.05-1.el9`` is
    ``580.95.05``, and is ``580.95.05-1.el9``. Text that is no version equals only itself.
    """
    if observed == wanted:
        return True
    try:
        seen, asked = parse(observed), parse(wanted)
    except ValueError:
        return False
    return (
        seen.upstream == asked.upstream
        and asked.revision in (None, seen.revision)
        and (asked.epoch is None or asked.epoch == (seen.epoch or 0))
    )


def compare(left: str, right: str, scheme: Scheme = "deb") -> int:
    """Return -1, 0 or 1 as the package manager would order two full versions. ValueError as parse.

    A missing epoch is 0 in both schemes. A missing Debian revision is ``0``; a missing RPM release matches any.
    """
    a, b = parse(left), parse(right)
    if (a.epoch or 0) != (b.epoch or 0):
        return _order((a.epoch or 0), (b.epoch or 0))
    upstream = _order(_key(a.upstream, scheme), _key(b.upstream, scheme))
    if upstream or (scheme == "rpm" and (a.revision is None or b.revision is None)):
        return upstream
    return _order(_key(a.revision or "0", scheme), _key(b.revision or "0", scheme))


def compare_upstream(left: str, right: str) -> int:
    """Return -1, 0 or 1 for which software is newer, whatever packaged it: epoch and revision are left out.

    The two may come from different package managers. ValueError as parse.
    """
    return _order(_key(upstream_of(left), "deb"), _key(upstream_of(right), "deb"))


def _order(left: object, right: object) -> int:
    if left == right:
        return 0
    return -1 if left < right else 1  # type: ignore[operator] # both are ints, or both are keys of one scheme


def _key(part: str, scheme: Scheme) -> _Key:
    return _deb_key(part) if scheme == "deb" else _rpm_key(part)


def _deb_key(part: str) -> _Key:
    """Return a sort key with dpkg's order: ``~`` before the end, the end before letters, letters before the rest."""
    pairs = [(text, digits) for text, digits in _DEB_PART.findall(part) if text or digits]
    keyed = [((*(_deb_weight(char) for char in text), 0), int(digits or 0)) for text, digits in pairs]
    return (*keyed, ((0,), 0))


def _deb_weight(char: str) -> int:
    if char == "~":
        return -1
    return ord(char) if char.isalpha() else ord(char) + 256


def _rpm_key(part: str) -> _Key:
    """Return a sort key with rpm's order: ``~``, the end, ``^``, letters, numbers; other characters only separate."""
    keyed: list[tuple[object, ...]] = []
    for piece in _RPM_PART.findall(part):
        if piece in "~^":
            keyed.append((0,) if piece == "~" else (2,))
        else:
            keyed.append((4, int(piece)) if piece.isdigit() else (3, piece))
    return (*keyed, (1,))
