"""What the chain asks of a node: few commands, each a question, through whatever connection testinfra made."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from kimi_runbook.acceptance.engine_log import parse_stamp
from kimi_runbook.acceptance.plan import PlanHost

_MAX_LOG_LINES = 5000  # bounds what one answer brings over the connection; a start prints a few dozen that match


class CommandResult(Protocol):
    """What testinfra gives back for a command."""

    @property
    def rc(self) -> int:
        """Exit status."""

    @property
    def stdout(self) -> str:
        """Standard output."""

    @property
    def stderr(self) -> str:
        """Standard error."""


class RemoteHost(Protocol):
    """The part of testinfra's host that is used here."""

    def run(self, command: str, *args: str) -> CommandResult:
        """Run a shell command, each ``%s`` replaced by a quoted argument."""


class HostError(Exception):
    """A question a node could not answer: no connection, or the command failed. The message says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A container as its runtime describes it.

    Attributes:
        id: Container id.
        running: Whether its process runs.
        started_at: When it was started last.
        restart_count: Restarts by the runtime's own policy.
        image_id: Id of the image it was made of, which no tag can move.
        entrypoint: The image's entrypoint.
        command: The whole command line: entrypoint, then arguments.
        env: The process's environment at its start.
    """

    id: str
    running: bool
    started_at: datetime | None
    restart_count: int
    image_id: str
    entrypoint: tuple[str, ...]
    command: tuple[str, ...]
    env: Mapping[str, str]

    @property
    def arguments(self) -> tuple[str, ...]:
        """The command line after the image's entrypoint."""
        length = len(self.entrypoint)
        return self.command[length:] if self.command[:length] == self.entrypoint else self.command


def parse_container(text: str) -> Container:
    """Return the container in the output of ``docker inspect``; raises HostError when it is none."""
    try:
        value: Mapping[str, Any] = json.loads(text)[0]
        config, state = value["Config"], value["State"]
        return Container(
            id=str(value["Id"]),
            running=bool(state["Running"]),
            started_at=parse_stamp(str(state["StartedAt"])),
            restart_count=int(value.get("RestartCount", 0)),
            image_id=str(value["Image"]),
            entrypoint=tuple(config.get("Entrypoint") or ()),
            command=(str(value["Path"]), *map(str, value["Args"])),
            env=dict(str(item).partition("=")[::2] for item in config.get("Env") or ()),
        )
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise HostError(f"docker inspect answered something else than a container ({error!r})") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMemory:
    """What the engine holds on one node.

    Attributes:
        gpu_used_mib: Memory in use on each GPU, in MiB, by index; None where nvidia-smi does not say.
        engine_rss_bytes: Resident memory of the container's processes, added up; what two of them share counts twice.
    """

    gpu_used_mib: list[int] | None
    engine_rss_bytes: int | None


def _numbers(words: Sequence[str]) -> list[int] | None:
    """Return the numbers, or None when there are none or something else is among them."""
    return [int(word) for word in words] if words and all(word.isdecimal() for word in words) else None


class EngineHost:
    """One node and the questions the chain has for it."""

    def __init__(self, plan: PlanHost, remote: RemoteHost) -> None:
        self.plan = plan
        self.name = plan.name
        self._remote = remote

    def container(self, name: str) -> Container:
        """Return the container of that name; raises HostError when there is none."""
        return parse_container(self._ask("docker inspect --type container %s", name))

    def repo_digests(self, image_id: str) -> tuple[str, ...]:
        """Return the registry references with digest under which the node has an image."""
        text = self._ask("docker image inspect --format '{{json .RepoDigests}}' %s", image_id)
        try:
            return tuple(str(item) for item in json.loads(text) or ())
        except (ValueError, TypeError) as error:
            raise HostError(f"docker image inspect answered {text[:80]!r}") from error

    def sha256_inside(self, container: str, path: str) -> str:
        """Return the SHA-256 of a file as the container sees it."""
        return self._ask("docker exec %s sha256sum %s", container, path).split()[0]

    def driver_loaded(self) -> str:
        """Return the version of the loaded nvidia module."""
        return self._ask("cat /sys/module/nvidia/version").strip()

    def memory(self, container: str) -> NodeMemory:
        """Return what the engine holds on this node, in one round trip; a part that cannot be had is None."""
        asked = self._ask(
            "nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits; echo --; docker top %s -eo pid,rss",
            container,
        )
        gpus, _, processes = asked.partition("--\n")
        rows = [row.split() for row in processes.splitlines()[1:]]  # the first row is the heading
        kib = _numbers([row[1] for row in rows if len(row) == 2])  # ps counts KiB
        return NodeMemory(
            gpu_used_mib=_numbers(gpus.split()),
            engine_rss_bytes=None if kib is None else 1024 * sum(kib),
        )

    def kill(self, container: str) -> None:
        """Kill a container's processes at once, as a lost node would end them."""
        self._ask("docker kill --signal KILL %s", container)

    def stop_unit(self, unit: str) -> None:
        """Stop a unit and wait until it has stopped."""
        self._ask("systemctl stop %s", unit)

    def start_unit(self, unit: str) -> None:
        """Start a unit; a container's unit counts as started before the engine in it is ready."""
        self._ask("systemctl reset-failed %s", unit)
        self._ask("systemctl start %s", unit)

    def unit_state(self, unit: str) -> str:
        """Return systemd's word for a unit's state, e.g. ``active`` or ``failed``."""
        return self._ask("systemctl show --property ActiveState --value %s", unit).strip()

    def unit_log_since(self, unit: str, since: str) -> list[str]:
        """Return what a unit wrote to the journal since a moment (``@`` and seconds of the Unix epoch)."""
        return self._ask("journalctl --unit %s --since %s --output cat --no-pager --quiet", unit, since).splitlines()

    def epoch_s(self) -> float:
        """Return the node's own clock, in seconds of the Unix epoch: journals are asked by it."""
        text = self._ask("date -u +%s.%N").strip()
        try:
            return float(text)
        except ValueError as error:
            raise HostError(f"date on {self.name} answered {text[:40]!r}") from error

    def unit_restarts(self, unit: str) -> int:
        """Return how often systemd has restarted a unit by itself."""
        text = self._ask("systemctl show --property NRestarts --value %s", unit).strip()
        if not text.isdecimal():
            raise HostError(f"{unit} has NRestarts={text!r}")
        return int(text)

    def log_lines(self, container: str, patterns: Sequence[str]) -> list[str]:
        """Return the container's log lines that hold one of the patterns, each with the runtime's time in front.

        The filter runs on the node: a log of a day of traffic stays where it is.
        """
        wanted = " ".join(f"-e {shlex.quote(pattern)}" for pattern in patterns)
        filtered = (
            f"docker logs --timestamps {shlex.quote(container)} 2>&1 | grep -F {wanted} | head -n {_MAX_LOG_LINES}"
        )
        return self._ask(filtered).splitlines()

    def counters(self, paths: Sequence[str]) -> int:
        """Return the sum of counters, each a file with one number."""
        text = self._ask("cat " + " ".join(shlex.quote(path) for path in paths))
        numbers = text.split()
        if len(numbers) != len(paths) or not all(number.isdecimal() for number in numbers):
            raise HostError(f"{', '.join(paths)} hold {text[:80]!r}")
        return sum(int(number) for number in numbers)

    def _ask(self, command: str, *args: str) -> str:
        try:
            # testinfra formats a command only when it has arguments; one without must not be formatted
            result = self._remote.run(command, *args)
        except (RuntimeError, OSError) as error:
            raise HostError(f"{self.name} does not answer ({error})") from error
        if result.rc != 0:
            said = (result.stderr or result.stdout).strip().splitlines()
            asked, last = command.split(" %s", maxsplit=1)[0], said[-1] if said else "no output"
            raise HostError(f"`{asked}` on {self.name} exited {result.rc}: {last}")
        return str(result.stdout)
