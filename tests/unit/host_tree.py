"""A fake host for tests: files below a folder, and the answers of its commands."""

from __future__ import annotations

from pathlib import Path

import command_run
import host_probe


class Tree:
    """Puts files and command answers where a probe with this root finds them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, path: str, content: str | bytes = "") -> Path:
        """Write one file."""
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content if isinstance(content, bytes) else content.encode())
        return target

    def link(self, path: str, target: str) -> None:
        """Make one symbolic link."""
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(target)

    def say(self, command: str, out: str = "", rc: int | str = 0, err: str = "") -> None:
        """Answer a command; ``rc`` may be ``timeout``."""
        name = f".commands/{command_run.answer_name(command.split())}"
        self.put(name, out)
        self.put(f"{name}.rc", f"{rc}\n")
        self.put(f"{name}.stderr", err)

    def probe(self, **options: object) -> host_probe.Probe:
        """Return a probe of this host."""
        return host_probe.Probe(root=self.root, **options)
