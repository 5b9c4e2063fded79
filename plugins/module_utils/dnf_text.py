"""What dnf prints, and the files it keeps its module state in. Pure; no dnf library is needed to read them."""

from __future__ import annotations

import re

_SECTION = re.compile(r"^(?P<name>[A-Z][A-Za-z ]+):$")
_SIZE_UNITS = ("B", "k", "M", "G", "T")
_INSTALLING = ("Installing", "Upgrading", "Downgrading", "Reinstalling")
_COMPLAINT = re.compile(r"^(?:Error: |Error:|Errors during downloading metadata|Cannot |Failed to |No match |Unable )")


def transaction(output):
    """Return ``{name: version}`` of what dnf's transaction table installs, versions as ``[epoch:]version-release``.

    A row has six words (name, architecture, version, repository, size, unit); a long one is broken over lines, so words
    are counted and not lines.
    """
    found, section, words = {}, None, []
    for line in output.splitlines():
        heading = _SECTION.match(line)
        if heading:
            section, words = heading["name"], []
        elif line.startswith(("Transaction Summary", "===")):
            section = None if line.startswith("Trans") else section
        elif (
            section
            and section.startswith(_INSTALLING)
            and line.startswith(" ")
            and not line.startswith("     replacing")
        ):
            words += line.split()
            while len(words) >= 6 and words[5] in _SIZE_UNITS:
                found[words[0]] = words[2]
                words = words[6:]
    return found


def removed(output):
    """Return the names dnf's transaction table removes."""
    names, section = [], None
    for line in output.splitlines():
        heading = _SECTION.match(line)
        if heading:
            section = heading["name"]
        elif line.startswith("Transaction Summary"):
            section = None
        elif section and section.startswith("Removing") and re.match(r"^ \S", line):
            names.append(line.split()[0])
    return names


def complaints(output):
    """Return dnf's own lines of complaint, joined, or the last line when it has none."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    found = [line for line in lines if _COMPLAINT.match(line) or line.startswith(("- ", "Problem"))]
    return "; ".join(found[:8]) if found else (lines or ["no output"])[-1]


def enabled_stream(text, module):
    """Return the stream a file of /etc/dnf/modules.d enables, or None; ``text`` None when there is no file."""
    fields = {}
    inside = False
    for line in (text or "").splitlines():
        if line.strip().startswith("["):
            inside = line.strip() == f"[{module}]"
        elif inside and "=" in line:
            name, _, value = line.partition("=")
            fields[name.strip()] = value.strip()
    return (fields.get("stream") or None) if fields.get("state") == "enabled" else None
