"""What a Docker engine changes in the machine's network settings, and how the lab puts that back.

dockerd adds chains of its own, sets the policy of FORWARD to DROP and turns forwarding on (docs.docker.com, "Packet
filtering and firewalls"); it leaves all of it behind when it ends.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path

from lab.commands import Purpose, ask, must
from lab.files import write_atomically

_FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings a Docker engine touches: the output of iptables-save, and ip_forward (``0`` or ``1``)."""

    rules: str
    forwarding: str


def remember(file: Path) -> None:
    """Write the machine's settings to a file, unless an earlier start of the lab's engine did."""
    if not file.exists():
        write_atomically(file, json.dumps(asdict(_current())) + "\n")


def put_back(file: Path) -> None:
    """Undo what the lab's engine changed since :func:`remember`; nothing where that was never called.

    Raises:
        RunbookError: When iptables refuses.
    """
    if not file.exists():
        return
    before, now = Settings(**json.loads(file.read_text())), _current()
    for arguments in undo(before.rules, now.rules):
        must(["iptables", *arguments], Purpose("firewall", "Compare `iptables-save` with what should be there."))
    if before.forwarding != now.forwarding:
        _FORWARDING.write_text(before.forwarding)


def undo(before: str, now: str) -> list[list[str]]:
    """Return the iptables arguments that remove chains ``DOCKER*`` and rules that jump to them, and restore policies.

    Both texts are outputs of iptables-save. Chains that were there before, and any other rule, are left alone.
    """
    old = _tables(before)
    commands: list[list[str]] = []
    for table, (policies, rules) in _tables(now).items():
        known = old.get(table, ({}, []))[0]
        added = [chain for chain in policies if chain.startswith("DOCKER") and chain not in known]
        for rule in rules:
            words = shlex.split(rule)
            if words[1] not in added and "-j" in words and words[words.index("-j") + 1] in added:
                commands.append(["-t", table, "-D", *words[1:]])
        commands += [["-t", table, "-F", chain] for chain in added]
        commands += [["-t", table, "-X", chain] for chain in added]
        if added:
            commands += [
                ["-t", table, "-P", chain, known.get(chain, "ACCEPT")]
                for chain, policy in policies.items()
                if policy != "-" and policy != known.get(chain, "ACCEPT")
            ]
    return commands


def _tables(text: str) -> dict[str, tuple[dict[str, str], list[str]]]:
    """Return {table: ({chain: policy}, rules)} of an output of iptables-save."""
    tables: dict[str, tuple[dict[str, str], list[str]]] = {}
    current: tuple[dict[str, str], list[str]] = ({}, [])
    for line in text.splitlines():
        if line.startswith("*"):
            current = tables.setdefault(line[1:].strip(), ({}, []))
        elif line.startswith(":"):
            chain, policy = line[1:].split()[:2]
            current[0][chain] = policy
        elif line.startswith("-A "):
            current[1].append(line)
    return tables


def _current() -> Settings:
    return Settings(ask(["iptables-save"]).out, _FORWARDING.read_text().strip())
