"""What the lab needs on the machine, what is missing, and how it gets there: installed by us, or named."""

from __future__ import annotations

import grp
import os
import shlex
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from kimi_runbook.errors import RunbookError
from lab.commands import Purpose, ask, stream
from lab.docker import Docker
from lab.dockerd import OwnEngine, find, start
from lab.progress import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A program the lab runs.

    Attributes:
        program: Name on PATH.
        package: Debian package that has it.
        purpose: What the lab does with it.
    """

    program: str
    package: str
    purpose: str


TOOLS = (
    Tool(program="mmdebstrap", package="mmdebstrap", purpose="builds the hosts' root file system"),
    Tool(program="dpkg-deb", package="dpkg", purpose="builds the stand-in packages"),
    Tool(program="apt-ftparchive", package="apt-utils", purpose="writes the repositories' Release files"),
    Tool(program="gpg", package="gnupg", purpose="signs the repositories"),
    Tool(program="gpg-agent", package="gpg-agent", purpose="keeps the signing key for gpg"),
    Tool(program="ssh", package="openssh-client", purpose="reaches the hosts"),
    Tool(program="ssh-keygen", package="openssh-client", purpose="makes the lab's keys"),
)
TEST_TOOLS = (  # what unit tests resolve RHEL's transactions with; the lab runs without
    Tool(program="dnf", package="dnf", purpose="resolves RHEL's transactions for real"),
    Tool(program="rpmbuild", package="rpm", purpose="builds stand-in packages for it"),
    Tool(program="createrepo_c", package="createrepo-c", purpose="writes the repository they lie in"),
)
DNF_PLUGINS = Path("/usr/lib/python3/dist-packages/dnf-plugins/versionlock.py")
DNF_PLUGINS_PACKAGE = "dnf-plugins-core"  # has no program of its own; brings the version lock
DOCKER_CLIENT = Tool(program="docker", package="docker.io", purpose="runs the lab's machines")
DOCKER_ENGINE = Tool(program="dockerd", package="docker.io", purpose="runs the lab's machines")
IPTABLES = Tool(program="iptables", package="iptables", purpose="lets the Docker engine set up its network")
# Of the virtual machines (lab/kernel) only, so that everything else does without.
KERNEL_TOOLS = (
    Tool(program="qemu-system-x86_64", package="qemu-system-x86", purpose="runs the virtual machines"),
    Tool(program="qemu-img", package="qemu-utils", purpose="makes the virtual machines' disks"),
    Tool(program="mke2fs", package="e2fsprogs", purpose="makes the virtual machines' file system"),
    *TOOLS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is on the machine.

    Attributes:
        programs: Those of the wanted programs that are found.
        is_root: Whether the user is root.
        has_apt: Whether packages come with apt.
        engine_answers: Whether a Docker engine answers.
        docker_group: Whether there is a docker group that the user is not in (an engine may run, out of reach).
    """

    programs: Collection[str]
    is_root: bool
    has_apt: bool
    engine_answers: bool
    docker_group: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What has to happen before the lab can be built: packages to install, and whether to start an engine."""

    packages: tuple[str, ...]
    start_engine: bool


def packages_for(wanted: Collection[Tool], seen: Situation) -> tuple[str, ...]:
    """Return the packages of the wanted tools that are missing.

    Raises:
        RunbookError: When something is missing that this user cannot install; names the command that would.
    """
    missing = [tool for tool in wanted if tool.program not in seen.programs]
    packages = tuple(dict.fromkeys(tool.package for tool in missing))
    if missing and not (seen.is_root and seen.has_apt):
        command = ("apt-get install " if seen.is_root else "sudo apt-get install ") + " ".join(packages)
        raise RunbookError(
            where="prerequisites",
            observed="missing: " + ", ".join(f"{tool.program} ({tool.purpose})" for tool in missing),
            expected="these programs on PATH, or root on a Debian machine so that they can be installed",
            next_step=f"Run: {command}" if seen.has_apt else f"Install the equivalents of: {command}",
        )
    return packages


def decide(seen: Situation) -> Decision:
    """Return what to do about a machine.

    Raises:
        RunbookError: When something is missing that this user cannot install; names the command that would.
    """
    wanted = [*TOOLS, DOCKER_CLIENT]
    if not seen.engine_answers and seen.is_root:
        wanted += [DOCKER_ENGINE, IPTABLES]
    packages = packages_for(wanted, seen)
    if not seen.engine_answers and not seen.is_root:
        hint = (
            "Run: sudo usermod -aG docker $USER, log in again"
            if seen.docker_group
            else "Start the engine (sudo systemctl start docker)"
        )
        raise RunbookError(
            where="Docker engine",
            observed="`docker info` gets no answer, and this user cannot start an engine",
            expected="an engine this user may use, or root",
            next_step=f"{hint}, or run `make lab` as root.",
        )
    return Decision(packages=packages, start_engine=not seen.engine_answers)


def observe(own: OwnEngine, which: Callable[[str], str | None] = shutil.which) -> Situation:
    """Look at the machine."""
    return Situation(
        programs=_found((*TOOLS, DOCKER_CLIENT, DOCKER_ENGINE, IPTABLES), which),
        is_root=os.geteuid() == 0,
        has_apt=_has_apt(which),
        engine_answers=find(own) is not None,
        docker_group=_outside_docker_group(),
    )


def provide_tools(wanted: Collection[Tool], log: Path, step: Step) -> None:
    """Install the wanted tools that are missing.

    Raises:
        RunbookError: When this user cannot, with the command that would help.
    """
    seen = Situation(
        programs=_found(wanted, shutil.which),
        is_root=os.geteuid() == 0,
        has_apt=_has_apt(shutil.which),
        engine_answers=False,
    )
    packages = packages_for(wanted, seen)
    if packages:
        step.say(f"installing {' '.join(packages)}")
        install(packages, log)
    step.outcome = f"installed {' '.join(packages)}" if packages else "all there"


def provide(own: OwnEngine, log: Path, step: Step) -> Docker:
    """Install what is missing and return a Docker engine that answers; start one only where none does.

    Raises:
        RunbookError: When this user cannot get there, with the command that would help.
    """
    decision = decide(observe(own))
    if decision.packages:
        step.say(f"installing {' '.join(decision.packages)}")
        install(decision.packages, log)
    engine = find(own)  # installing docker.io starts the distribution's engine where an init system runs
    if engine is not None:
        step.outcome = _outcome(decision.packages, "uses the Docker engine that answers", engine)
        if engine == own.docker:
            step.outcome = _outcome(decision.packages, "the lab's own Docker engine runs", engine)
        return engine
    step.say("starting a Docker engine of the lab's own")
    engine = start(own)
    step.outcome = _outcome(decision.packages, "started a Docker engine of the lab's own", engine)
    return engine


def missing_test_tools(which: Callable[[str], str | None] = shutil.which) -> tuple[str, ...]:
    """Return the packages that unit tests miss; those tests are skipped with that reason."""
    packages = [tool.package for tool in TEST_TOOLS if not which(tool.program)]
    return (*packages, *(() if DNF_PLUGINS.exists() else (DNF_PLUGINS_PACKAGE,)))


def provide_test_tools(log: Path, step: Step) -> None:
    """Install what unit tests resolve packages with, or name it where this user cannot."""
    packages = missing_test_tools()
    if not packages:
        step.outcome = "there"
    elif os.geteuid() == 0 and Path("/etc/debian_version").exists():
        step.say(f"installing {' '.join(packages)}")
        install(packages, log)
        step.outcome = f"installed {' '.join(packages)}"
    else:
        step.outcome = f"missing {' '.join(packages)}: the tests that need them are skipped"


def install(packages: Sequence[str], log: Path) -> None:
    """Install Debian packages, after a refresh of the package lists where there are none yet or they are too old."""
    environment = {"DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *packages]
    next_step = f"Run: {shlex.join(command)}."
    lists = any(Path("/var/lib/apt/lists").glob("*_Packages*"))
    if not lists or ask([*command, "--download-only"], environment=environment, timeout_s=1800).status != 0:
        stream(["apt-get", "update"], Purpose("apt-get", "Check the apt sources."), log=log, environment=environment)
    stream(command, Purpose("apt-get", next_step), log=log, environment=environment)


def _outcome(packages: Sequence[str], text: str, engine: Docker) -> str:
    installed = f"installed {' '.join(packages)}; " if packages else ""
    return f"{installed}{text} ({engine.answers() or 'no answer'})"


def _found(tools: Collection[Tool], which: Callable[[str], str | None]) -> frozenset[str]:
    return frozenset(tool.program for tool in tools if which(tool.program) or _in_sbin(tool.program))


def _has_apt(which: Callable[[str], str | None]) -> bool:
    return which("apt-get") is not None and Path("/etc/debian_version").exists()


def _in_sbin(program: str) -> bool:
    """Return whether a program is where only root's PATH looks."""
    return any(Path(directory, program).exists() for directory in ("/usr/sbin", "/sbin"))


def _outside_docker_group() -> bool:
    try:
        return grp.getgrnam("docker").gr_gid not in os.getgroups()
    except KeyError:
        return False
