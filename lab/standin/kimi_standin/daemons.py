"""nvidia-persistenced, nvidia-fabricmanager, nvidia-imex, nvlsm and nvidia-modprobe.

The daemons are real processes: persistenced keeps the GPUs' device nodes open, and each goes on running as the version
it was started with after its package has changed, as on a real host.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from . import NOTICE
from .loading import LoadError, NotFoundError, load, make_nodes
from .modtools import error, told_what_it_is
from .state import Host, root_from_environment


def notify_ready() -> None:
    """Tell systemd that the daemon is up, where systemd asked to be told (sd_notify's protocol)."""
    import socket  # noqa: PLC0415 - costs 20 ms at start, and only daemons need it

    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.sendto(b"READY=1", address.replace("@", "\0", 1))


def rename_process(name: str) -> None:
    """Give the process its program's name (15 characters, as the kernel keeps it), so that ps and fuser show it."""
    Path("/proc/self/comm").write_text(name[:15])


def wait_for_the_end() -> None:
    """Return when SIGTERM or SIGINT arrives."""
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


def hold_signals() -> None:
    """Keep SIGTERM and SIGINT pending until ``wait_for_the_end``; before, they would end the process half-way."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})


def persistenced(arguments: list[str]) -> int:
    """Keep every GPU open until told to stop.

    Refuses when the module is not loaded or the library is of another version, as the real daemon does.
    """
    if told_what_it_is("nvidia-persistenced", arguments):
        return 0
    host = Host(root_from_environment())
    library, loaded = host.library_version("libnvidia-ml.so.1"), host.loaded_version("nvidia")
    if loaded is None or loaded != library:
        why = "module nvidia is not loaded" if loaded is None else f"driver {loaded}, library {library}"
        error(f"nvidia-persistenced failed to initialize ({why}). Check syslog for more details.")
        return 1
    hold_signals()
    rename_process("nvidia-persistenced")
    nodes = [host.path(f"/dev/nvidia{gpu.index}").open("rb") for gpu in host.gpus()]
    with host.lock():
        host.path("/sys/module/nvidia/refcnt").write_text(f"{host.refcnt('nvidia') + 1}\n")
    print(f"Started ({NOTICE}), driver {loaded}, {len(nodes)} GPUs", flush=True)
    notify_ready()
    wait_for_the_end()
    for node in nodes:
        node.close()
    with host.lock():
        host.refresh()
    return 0


def fabricmanager(arguments: list[str]) -> int:
    """Stay up when the loaded driver is exactly the version this was packaged as (first argument), else refuse."""
    if told_what_it_is("nv-fabricmanager", arguments):
        return 0
    host = Host(root_from_environment())
    own, loaded = arguments[0], host.loaded_version("nvidia")
    if loaded != own:
        error(
            f"fabric manager NVIDIA GPU driver interface version {own} don't match with driver version {loaded}. "
            "Please update with matching NVIDIA driver package."
        )
        return 1
    if not host.hardware().get("nvswitch"):
        error(
            "request to query NVSwitch device information from NVSwitch driver failed with error:WARNING Nothing to do"
        )
        return 1
    return stay("nv-fabricmanager", own)


def imex(arguments: list[str]) -> int:
    """Stay up when the loaded driver is exactly the version this was packaged as, else refuse."""
    if told_what_it_is("nvidia-imex", arguments):
        return 0
    loaded = Host(root_from_environment()).loaded_version("nvidia")
    if loaded != arguments[0]:
        error(f"nvidia-imex {arguments[0]} does not fit the loaded driver {loaded}")
        return 1
    return stay("nvidia-imex", arguments[0])


def runs(name: str) -> bool:
    """Say whether a process of this name runs."""
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            if path.read_text().strip() == name:
                return True
        except OSError:  # it ended meanwhile
            continue
    return False


def imex_ctl(arguments: list[str]) -> int:
    """Answer ``nvidia-imex-ctl -N -j``: every node of the list is READY where this host's daemon runs.

    The other nodes are not asked: the stand-in has no network of its own.
    """
    if told_what_it_is("nvidia-imex-ctl", arguments):
        return 0
    if arguments[1:] != ["-N", "-j"]:
        error(f"nvidia-imex-ctl ({NOTICE}) answers only: nvidia-imex-ctl -N -j")
        return 1
    if not runs("nvidia-imex"):
        error("nvidia-imex-ctl: unable to connect to the IMEX service")
        return 1
    listed = Host(root_from_environment()).path("/etc/nvidia-imex/nodes_config.cfg").read_text().split()
    rows = {str(number): {"host": host, "status": "CONNECTED"} for number, host in enumerate(listed)}
    nodes = {
        number: {"host": row["host"], "status": "READY", "version": arguments[0], "connections": rows}
        for number, row in rows.items()
    }
    print(json.dumps({"status": "UP", "nodes": nodes}))
    return 0


def nvlsm(arguments: list[str]) -> int:
    """Stay up when ib_umad is loaded, which the subnet manager needs."""
    if told_what_it_is("nvlsm", arguments):
        return 0
    if not Host(root_from_environment()).is_loaded("ib_umad"):
        error("nvlsm: no umad device: load module ib_umad")
        return 1
    return stay("nvlsm", arguments[0])


def stay(name: str, version: str) -> int:
    """Report readiness and wait to be stopped."""
    hold_signals()
    rename_process(name)
    print(f"{name} {version} started ({NOTICE})", flush=True)
    notify_ready()
    wait_for_the_end()
    return 0


def nvidia_modprobe(arguments: list[str]) -> int:
    """Load nvidia (-u: nvidia_uvm, -m: nvidia_modeset) and make the device nodes."""
    if told_what_it_is("nvidia-modprobe", arguments):
        return 0
    names = ["nvidia"]
    names += ["nvidia_uvm"] if {"-u", "--unified-memory"} & set(arguments) else []
    names += ["nvidia_modeset"] if {"-m", "--modeset"} & set(arguments) else []
    host = Host(root_from_environment())
    try:
        with host.lock():
            for name in names:
                load(host, name)
                make_nodes(host, name)
    except NotFoundError as missing:
        error(f"nvidia-modprobe: module {missing} not found")
        return 1
    except LoadError as refusal:
        error(f"nvidia-modprobe: could not load {names}: {refusal}")
        return 1
    return 0
