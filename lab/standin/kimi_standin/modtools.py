"""modprobe, rmmod, lsmod, modinfo, dkms and mokutil, answering from the stand-in's state in the real tools' words."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from . import NOTICE
from .loading import (
    BusyError,
    LoadError,
    NotFoundError,
    built_for,
    kernel,
    load,
    machine,
    unload,
    unload_with_dependencies,
)
from .state import Host, canonical, root_from_environment

HELP_WORDS = ("-h", "--help", "-V", "--version")


def error(text: str) -> None:
    """Print one line to standard error."""
    print(text, file=sys.stderr)


def told_what_it_is(tool: str, arguments: list[str]) -> bool:
    """Answer --help and --version; return whether one was asked for."""
    if not any(word in HELP_WORDS for word in arguments):
        return False
    print(f"{tool} ({NOTICE})")
    return True


def hand_over(tool: str, arguments: list[str]) -> None:
    """Run the host's own tool instead, where there is one; modules the stand-in does not know are its business."""
    real = Path("/usr/sbin") / tool
    if root_from_environment() == Path("/") and real.is_file():
        os.execv(real, [tool, *arguments])  # noqa: S606 - replaces this process on purpose, no shell involved


def split_options(arguments: list[str]) -> tuple[set[str], list[str]]:
    """Return the options, single letters apart, and the other words."""
    options: set[str] = set()
    words: list[str] = []
    for argument in arguments:
        if argument.startswith("--"):
            options.add(argument)
        elif argument.startswith("-"):
            options |= {f"-{letter}" for letter in argument[1:]}
        else:
            words.append(argument)
    return options, words


def modprobe(arguments: list[str]) -> int:
    """Load modules, or with -r unload them and what they no longer need.

    Without -a only the first word is a module and the rest are its parameters, as in the real tool.
    """
    if told_what_it_is("modprobe", arguments):
        return 0
    options, words = split_options(arguments)
    host = Host(root_from_environment())
    removing = bool(options & {"-r", "--remove"})
    names = words if removing or options & {"-a", "--all"} else words[:1]
    quiet = bool(options & {"-q", "--quiet"})
    if not names:
        error("modprobe: ERROR: missing parameters. See -h.")
        return 1
    if not any(host.on_disk(name) or host.is_loaded(name) for name in names):
        hand_over("modprobe", arguments)
    if options & {"-n", "--dry-run", "--show"}:
        return 0 if all(host.on_disk(name) for name in names) else 1
    with host.lock():
        results = [_remove(host, name) if removing else _insert(host, name, quiet) for name in names]
    return max(results)


def _insert(host: Host, name: str, quiet: bool) -> int:
    try:
        load(host, name)
    except NotFoundError:
        if not quiet:
            error(f"modprobe: FATAL: Module {name} not found in directory /lib/modules/{kernel()}")
        return 1
    except LoadError as refusal:
        error(f"modprobe: ERROR: could not insert '{canonical(name)}': {refusal}")
        return 1
    return 0


def _remove(host: Host, name: str) -> int:
    try:
        unload_with_dependencies(host, name)
    except NotFoundError:
        if host.on_disk(name):
            return 0  # known and not loaded: nothing to do, as in the real tool without --first-time
        error(f"modprobe: FATAL: Module {name} not found.")
        return 1
    except BusyError:
        error(f"modprobe: FATAL: Module {canonical(name)} is in use.")
        return 1
    return 0


def rmmod(arguments: list[str]) -> int:
    """Unload the named modules, in the order given."""
    if told_what_it_is("rmmod", arguments):
        return 0
    _, words = split_options(arguments)
    if not words:
        error("rmmod: ERROR: missing module name.")
        return 1
    host = Host(root_from_environment())
    if not any(host.on_disk(name) or host.is_loaded(name) for name in words):
        hand_over("rmmod", arguments)
    status = 0
    with host.lock():
        for name in (canonical(word) for word in words):
            try:
                unload(host, name)
            except NotFoundError:
                error(f"rmmod: ERROR: Module {name} is not currently loaded")
                status = 1
            except BusyError as busy:
                by = " by: " + " ".join(busy.args[0]) if busy.args[0] else ""
                error(f"rmmod: ERROR: Module {name} is in use{by}")
                status = 1
    return status


def lsmod(arguments: list[str]) -> int:
    """List the loaded stand-in modules with size, reference count and users."""
    if told_what_it_is("lsmod", arguments):
        return 0
    host = Host(root_from_environment())
    host.refresh()
    print("Module                  Size  Used by")
    for name in host.loaded():
        line = f"{name:<20} {16384:>8}  {host.refcnt(name)} {','.join(host.users(name))}"
        print(line.rstrip())
    return 0


def modinfo(arguments: list[str]) -> int:
    """Print facts of a module on disk: all, or one with -F FIELD; -k KERNEL asks for another kernel."""
    if told_what_it_is("modinfo", arguments):
        return 0
    release, field, names = kernel(), None, []
    words = iter(arguments)
    for word in words:
        if word in ("-k", "--set-version"):
            release = next(words, release)
        elif word in ("-F", "--field"):
            field = next(words, None)
        else:
            names.append(word)
    if not names:
        error("modinfo: ERROR: missing module or filename.")
        return 1
    host = Host(root_from_environment())
    status = 0
    for name in names:
        module = host.on_disk(name)
        if module is None or not built_for(host, module, release):
            error(f"modinfo: ERROR: Module {name} not found.")
            status = 1
            continue
        folder = "kernel/drivers" if module.flavour == "kernel" else "updates/dkms"
        facts = {
            "filename": f"/lib/modules/{release}/{folder}/{module.name.replace('_', '-')}.ko",
            "description": module.description,
            "license": module.license,
            "version": module.version,
            "depends": ",".join(module.depends),
            "name": module.name,
            "vermagic": f"{release} SMP preempt mod_unload modversions",
        }
        if field is None:
            print("\n".join(f"{key + ':':<15} {value}" for key, value in facts.items() if value or key == "depends"))
        elif facts.get(field):
            print(facts[field])
    return status


def dkms(arguments: list[str]) -> int:
    """Answer ``dkms status``: the NVIDIA source on disk and whether it was built for the running kernel."""
    if told_what_it_is("dkms", arguments):
        return 0
    if not arguments or arguments[0] != "status":
        error(f"dkms ({NOTICE}) answers only: dkms status")
        return 1
    host = Host(root_from_environment())
    module = host.on_disk("nvidia")
    if module is None:
        return 0
    wanted = [word.split("/")[0] for word in arguments[1:] if not word.startswith("-")]
    if wanted and "nvidia" not in wanted:
        return 0
    if built_for(host, module, kernel()):
        print(f"nvidia/{module.version}, {kernel()}, {machine()}: installed")
    else:
        print(f"nvidia/{module.version}: added")
    return 0


def mokutil(arguments: list[str]) -> int:
    """Answer ``mokutil --sb-state`` from hardware.json's ``secure_boot``."""
    if told_what_it_is("mokutil", arguments):
        return 0
    if arguments != ["--sb-state"]:
        error(f"mokutil ({NOTICE}) answers only: mokutil --sb-state")
        return 1
    enabled = Host(root_from_environment()).hardware().get("secure_boot") is True
    print(f"SecureBoot {'enabled' if enabled else 'disabled'}")
    return 0
