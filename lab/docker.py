"""The Docker command line, as far as the lab uses it, and what the lab made with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lab.commands import Answer, Purpose, ask, must
from lab.settings import LABEL, SPEC_LABEL

_NEXT_STEP = "Check `docker info`, then run `make lab` again."


@dataclass(frozen=True, slots=True)
class Docker:
    """One Docker engine.

    Attributes:
        host: Value of DOCKER_HOST, or None for the engine the command line finds by itself.
    """

    host: str | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Environment for programs that have to reach this engine."""
        return {} if self.host is None else {"DOCKER_HOST": self.host}

    def answers(self) -> str | None:
        """Return the engine's version, or None when no engine answers."""
        answer = self.ask("info", "--format", "{{.ServerVersion}}", timeout_s=20)
        version = answer.out.strip()
        return version if answer.status == 0 and version else None

    def ask(self, *arguments: str, timeout_s: float = 60) -> Answer:
        """Run a docker command for its answer."""
        return ask(["docker", *arguments], environment=self.environment, timeout_s=timeout_s)

    def must(self, *arguments: str, data: bytes | None = None, timeout_s: float = 600, where: str = "docker") -> str:
        """Run a docker command that has to succeed and return its output.

        Raises:
            RunbookError: When it does not.
        """
        return must(
            ["docker", *arguments],
            Purpose(where, _NEXT_STEP),
            environment=self.environment,
            data=data,
            timeout_s=timeout_s,
        )

    def inspect(self, kind: str, name: str) -> dict[str, Any] | None:
        """Return what ``docker <kind> inspect`` knows of an object, or None when there is none."""
        answer = self.ask(kind, "inspect", name)
        if answer.status != 0:
            return None
        found: list[dict[str, Any]] = json.loads(answer.out)
        return found[0] if found else None

    def shell(self, container: str, script: str, *, timeout_s: float = 600) -> str:
        """Run a shell script in a container; it has to succeed."""
        return self.must("exec", container, "sh", "-euc", script, timeout_s=timeout_s, where=container)

    def ours(self, kind: str) -> list[str]:
        """Return the identifiers of everything of one kind that carries the lab's label.

        ``kind`` is container, network, volume or image.
        """
        return self.must(*list_arguments(kind)).split()


def list_arguments(kind: str) -> list[str]:
    """Return the docker arguments that list the lab's objects of a kind, one identifier a line."""
    everything = ["--all"] if kind in ("container", "image") else []
    return [kind, "ls", *everything, "--quiet", "--filter", f"label={LABEL}=1"]


def remove_arguments(kind: str, identifiers: Sequence[str]) -> list[str]:
    """Return the docker arguments that remove objects of a kind, running containers and their volumes included."""
    options = {"container": ["--force", "--volumes"], "image": ["--force"]}.get(kind, [])
    return [kind, "rm", *options, *identifiers]


def label_arguments(spec: str | None = None) -> list[str]:
    """Return the ``--label`` arguments for something the lab makes."""
    arguments = ["--label", f"{LABEL}=1"]
    if spec is not None:
        arguments += ["--label", f"{SPEC_LABEL}={spec}"]
    return arguments
