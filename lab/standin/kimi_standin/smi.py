"""nvidia-smi: the table, -L, -q and the CSV queries that scripts and monitoring ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

from . import NOTICE
from .nvml import NvmlError, Session, cuda_version, field, nvml_version, open_session
from .state import Gpu, Holder, Host, root_from_environment

UNITS = (" MiB", " W", " MHz", " %")
HELP = f"""NVIDIA System Management Interface ({NOTICE})

    nvidia-smi                                   table of all GPUs
    nvidia-smi -L, --list-gpus                   one line per GPU
    nvidia-smi -q, --query                       all facts as text
    nvidia-smi --query-gpu=F1,F2 --format=csv[,noheader][,nounits]
    nvidia-smi --query-compute-apps=F1,F2 --format=csv[,noheader][,nounits]
    nvidia-smi --version                         versions of tool, library and driver
    -i, --id=ID                                  index or UUID of one GPU"""

# Spelling on the command line -> (name, takes a value). Real short and long forms.
OPTIONS = {
    "-L": ("list", False),
    "--list-gpus": ("list", False),
    "-q": ("query", False),
    "--query": ("query", False),
    "--version": ("version", False),
    "-i": ("id", True),
    "--id": ("id", True),
    "--query-gpu": ("gpu", True),
    "--query-compute-apps": ("apps", True),
    "--format": ("format", True),
}


class UsageError(Exception):
    """The command line is not one this tool answers."""


def parse(arguments: Sequence[str]) -> dict[str, str]:
    """Return the options by name; both ``--option=value`` and ``--option value`` are read.

    Raises:
        UsageError: An unknown option, or one without its value.
    """
    options: dict[str, str] = {}
    words = iter(arguments)
    for word in words:
        spelling, equals, value = word.partition("=")
        name, takes_value = OPTIONS.get(spelling, ("", False))
        if not name:
            raise UsageError(f"Invalid combination of input arguments. Please run 'nvidia-smi -h' for help. ({word})")
        if takes_value and not equals:
            value = next(words, "")
        if takes_value and not value:
            raise UsageError(f"Option {spelling} needs a value. Please run 'nvidia-smi -h' for help.")
        options[name] = value
    return options


def main(arguments: list[str]) -> int:
    """Answer one call; return the exit code the real tool would give."""
    if "-h" in arguments or "--help" in arguments:
        print(HELP)
        return 0
    try:
        options = parse(arguments)
    except UsageError as problem:
        print(problem)
        return 2
    host = Host(root_from_environment())
    if "version" in options:
        print(versions(host))
        return 0
    try:
        code, text = answer(host, options)
    except NvmlError as refusal:
        code, text = refusal.code, str(refusal)
    print(text)
    return code


def answer(host: Host, options: dict[str, str]) -> tuple[int, str]:
    """Return exit code and text for parsed options.

    Raises:
        NvmlError: NVML cannot be used.
    """
    session = open_session(host)
    gpus = [gpu for gpu in session.gpus if options.get("id", gpu.uuid) in (str(gpu.index), gpu.uuid, gpu.pci)]
    if not gpus:
        return 6, "No devices were found"
    if "list" in options:
        return 0, "\n".join(f"GPU {gpu.index}: {gpu.name} (UUID: {gpu.uuid})" for gpu in gpus)
    if "query" in options:
        return 0, full_report(session, gpus)
    if "gpu" in options:
        now = datetime.now().strftime("%Y/%m/%d %H:%M:%S.%f")[:-3]
        rows = [lambda name, gpu=gpu: now if name == "timestamp" else field(session, gpu, name) for gpu in gpus]
        return csv(options["gpu"], options.get("format", ""), rows)
    if "apps" in options:
        holders = [holder for holder in host.gpu_holders() if not holder.name.startswith("nvidia-persiste")]
        apps = [lambda name, holder=holder: application(gpus[0], holder, name) for holder in holders]
        return csv(options["apps"], options.get("format", ""), apps, known=lambda n: application(gpus[0], NOBODY, n))
    return 0, table(session, gpus)


NOBODY = Holder(0, "")


def application(gpu: Gpu, holder: Holder, name: str) -> str | None:
    """Return one field of a process that has a GPU open, or None for a field this stand-in does not know."""
    return {
        "pid": str(holder.pid),
        "process_name": holder.name,
        "name": holder.name,
        "used_memory": "0 MiB",
        "used_gpu_memory": "0 MiB",
        "gpu_uuid": gpu.uuid,
        "gpu_name": gpu.name,
    }.get(name)


Row = Callable[[str], str | None]


def csv(fields: str, form: str, rows: Sequence[Row], known: Row | None = None) -> tuple[int, str]:
    """Return exit code and CSV text, one line per row; units go into the header as nvidia-smi does it."""
    names = [name.strip() for name in fields.split(",") if name.strip()]
    words = {word.strip() for word in form.split(",")}
    if "csv" not in words:
        return 2, '"--format=" switch is missing. Option --query-* requires --format=csv'
    sample = known or rows[0]
    for name in names:
        if sample(name) is None:
            return 2, f'Field "{name}" is not a valid field to query.\n'
    lines = [", ".join(name + unit_of(sample(name)) for name in names)] if "noheader" not in words else []
    for row in rows:
        values = [row(name) or "" for name in names]
        lines.append(", ".join(without_unit(value) if "nounits" in words else value for value in values))
    return 0, "\n".join(lines)


def unit_of(value: str | None) -> str:
    """Return the header's unit for a value such as "0 MiB": " [MiB]"."""
    return next((f" [{unit.strip()}]" for unit in UNITS if (value or "").endswith(unit)), "")


def without_unit(value: str) -> str:
    """Return a value without its unit."""
    return next((value.removesuffix(unit) for unit in UNITS if value.endswith(unit)), value)


def versions(host: Host) -> str:
    """Return what --version prints: tool, library, driver and CUDA, and that this is a stand-in."""
    library = host.library_version("libnvidia-ml.so.1")
    return (
        f"NVIDIA-SMI version  : {library or 'N/A'} ({NOTICE})\n"
        f"NVML version        : {nvml_version(library) if library else 'N/A'}\n"
        f"DRIVER version      : {host.loaded_version('nvidia') or 'N/A'}\n"
        f"CUDA Version        : {cuda_version(host)}"
    )


def table(session: Session, gpus: Sequence[Gpu]) -> str:
    """Return the table of a call without arguments, in the layout of the 580 branch."""
    bar = "+" + "-" * 41 + "+" + "-" * 24 + "+" + "-" * 22 + "+"
    head = f"NVIDIA-SMI {session.version:<22} Driver Version: {session.version:<14} CUDA Version: {session.cuda:<8}"
    lines = [datetime.now().strftime("%a %b %d %H:%M:%S %Y"), "+" + "-" * 89 + "+", f"| {head:<87} |"]
    lines += [f"| {NOTICE:<87} |", bar.replace("+", "|", 1)[:-1] + "|"]
    lines.append(
        f"| {'GPU  Name':<26}{'Persistence-M':>13} | {'Bus-Id':<16}{'Disp.A':>6} | {'Volatile Uncorr. ECC':>20} |"
    )
    lines.append(
        f"| {'Fan  Temp   Perf':<18}{'Pwr:Usage/Cap':>21} | {'Memory-Usage':>22} | {'GPU-Util  Compute M.':>20} |"
    )
    lines.append(bar.replace("-", "=").replace("+", "|", 1)[:-1] + "|")
    for gpu in gpus:
        mode = "On" if session.persistence else "Off"
        lines.append(f"| {gpu.index:>3}  {gpu.name:<26}{mode:>8} | {gpu.pci:<16}{'Off':>6} | {'0':>20} |")
        memory = f"0MiB / {gpu.memory_mib}MiB"
        lines.append(f"| {'N/A   30C    P0':<18}{'140W / 1100W':>21} | {memory:>22} | {'0%      Default':>20} |")
        lines.append(bar)
    return "\n".join(lines)


def full_report(session: Session, gpus: Sequence[Gpu]) -> str:
    """Return what -q prints, as far as an idle GPU has something to say."""
    lines = [
        "",
        "==============NVSMI LOG==============",
        "",
        f"Note                                      : {NOTICE}",
        f"Timestamp                                 : {datetime.now().strftime('%a %b %d %H:%M:%S %Y')}",
        f"Driver Version                            : {session.version}",
        f"CUDA Version                              : {session.cuda}",
        "",
        f"Attached GPUs                             : {len(session.gpus)}",
    ]
    for gpu in gpus:
        lines += [f"GPU {gpu.pci}", *(_indented(session, gpu))]
    return "\n".join(lines)


def _indented(session: Session, gpu: Gpu) -> list[str]:
    def value(name: str) -> str:
        return field(session, gpu, name) or "N/A"

    single = [
        ("Product Name", gpu.name),
        ("Persistence Mode", value("persistence_mode")),
        ("MIG Mode", ""),
        ("    Current", value("mig.mode.current")),
        ("Minor Number", str(gpu.index)),
        ("GPU UUID", gpu.uuid),
        ("PCI", ""),
        ("    Bus Id", gpu.pci),
        ("FB Memory Usage", ""),
        ("    Total", value("memory.total")),
        ("    Used", value("memory.used")),
        ("    Free", value("memory.free")),
        ("ECC Mode", ""),
        ("    Current", value("ecc.mode.current")),
        ("ECC Errors", ""),
        ("    Volatile Uncorrectable", value("ecc.errors.uncorrected.volatile.total")),
        ("    Aggregate Uncorrectable", value("ecc.errors.uncorrected.aggregate.total")),
        ("Remapped Rows", ""),
        ("    Correctable Error", value("remapped_rows.correctable")),
        ("    Uncorrectable Error", value("remapped_rows.uncorrectable")),
        ("    Pending", "No"),
        ("    Remapping Failure Occurred", "No"),
        ("Fabric", ""),
        ("    State", "N/A"),
        ("    Status", "N/A"),
        ("Processes", "None"),
    ]
    return [f"    {name:<38}: {text}" if text else f"    {name}" for name, text in single]
