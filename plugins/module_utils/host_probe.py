"""Questions the host_snapshot module asks a host, each answered as plain JSON values.

Runs on the node with whatever Python the distribution ships (3.9 or newer) and nothing else. Every function takes a
:class:`Probe`, the only thing that touches the host, so a tree of files and canned command answers can stand in for it.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import socket
import subprocess
from pathlib import Path

SCHEMA_VERSION = 1

# Packages reported whether or not somebody asked for them: a stray driver package is what breaks the next upgrade.
_DRIVER_PACKAGE = re.compile(r"^(lib)?nvidia|^libcuda\d|^cuda-drivers|^nvlsm$|^(kmod|dkms)-nvidia")

# Only names that steer the engine leave the container; anything else could be a secret. A node has no library, so
# both patterns and the options stand in kimi_runbook/environment.py as well; a unit test holds them together.
_ENGINE_ENV = re.compile(
    r"(NCCL|UCX|GLOO|VLLM|CUDA|NVIDIA|TORCH|TORCHDYNAMO|PYTORCH|OMP|TP|MASTER)_[A-Z0-9_]+|HF_HUB_OFFLINE"
)
_SECRET_NAME = re.compile(
    r"KEY|(?<!MAX_)(?<!NUM_)TOKEN(?!IZ|S_PER)|SECRET|PASSW|PASSPHRASE|PASS$|CREDENTIAL|AUTH", re.IGNORECASE
)
_SECRET_OPTIONS = ("--api-key", "--hf-token")
_NOT_SHOWN = "(not shown)"

_NVRM_VERSION = re.compile(r"Kernel Module(?P<open> for \S+)?\s+(?P<version>\d+(?:\.\d+)+)")
_LISTEN = "0A"


class Probe:
    """Reads files below ``root`` and runs commands with a time limit; keeps what could not be answered.

    Attributes:
        errors: One ``{"probe", "message"}`` per question that got no usable answer.
    """

    def __init__(self, root="/", timeout_s=10, run=subprocess.run):
        self.root = Path(root)
        self.timeout_s = timeout_s
        self.errors = []
        self._run = run

    def path(self, absolute):
        """Return where an absolute path of the host lies below the root."""
        return self.root / str(absolute).lstrip("/")

    def text(self, absolute):
        """Return a file's text, or None when it does not exist or cannot be read."""
        try:
            return self.path(absolute).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
                self.errors.append({"probe": str(absolute), "message": str(error.strerror)})
            return None

    def glob(self, pattern):
        """Return the paths below the root that match, sorted."""
        return sorted(self.root.glob(pattern.lstrip("/")))

    def command(self, *argv):
        """Return ``(rc, stdout, stderr)``, or None when the program is missing or did not answer in time."""
        env = dict(os.environ, LC_ALL="C.UTF-8", LANGUAGE="C")
        try:
            done = self._run(argv, capture_output=True, text=True, timeout=self.timeout_s, env=env, errors="replace")
        except FileNotFoundError:
            return None
        except subprocess.TimeoutExpired:
            self.errors.append({"probe": argv[0], "message": f"no answer within {self.timeout_s} s"})
            return None
        except OSError as error:
            self.errors.append({"probe": argv[0], "message": str(error)})
            return None
        return done.returncode, done.stdout, done.stderr

    def json_command(self, *argv):
        """Return the JSON a command prints, or None when it failed or printed something else."""
        answer = self.command(*argv)
        if answer is None or answer[0] != 0:
            return None
        try:
            return json.loads(answer[1])
        except ValueError:
            self.errors.append({"probe": " ".join(argv[:2]), "message": "did not print JSON"})
            return None


def system(probe):
    """Return the distribution, the kernel and the architecture."""
    release = {}
    for line in (probe.text("/etc/os-release") or "").splitlines():
        name, separator, value = line.partition("=")
        if separator:
            release[name] = value.strip("\"'")
    uname = os.uname()
    return {
        "id": release.get("ID", "unknown"),
        "version_id": release.get("VERSION_ID", "unknown"),
        "pretty": release.get("PRETTY_NAME", "unknown"),
        "kernel": uname.release,
        "arch": uname.machine,
    }


def boot(probe):
    """Return what changes with a boot: the kernel's boot id and the start of process 1, in clock ticks."""
    stat = probe.text("/proc/1/stat") or ""
    fields = stat.rpartition(")")[2].split()
    return {
        "boot_id": (probe.text("/proc/sys/kernel/random/boot_id") or "").strip() or None,
        "pid1_started_ticks": int(fields[19]) if len(fields) > 19 else None,
    }


def packages(probe, wanted):
    """Return ``{name: {"version", "held"} | None}`` for the wanted names and every driver package installed."""
    found = dict.fromkeys(wanted)
    answer = probe.command("dpkg-query", "--show", "--showformat", "${Package}\t${db:Status-Abbrev}\t${Version}\n")
    if answer is not None:
        for line in answer[1].splitlines():
            name, status, version = line.split("\t")
            if status[1:2] == "i" and (name in found or _DRIVER_PACKAGE.search(name)):
                found[name] = {"version": version, "held": status[0] == "h"}
        return found
    answer = probe.command("rpm", "--query", "--all", "--queryformat", "%{NAME}\t%{VERSION}-%{RELEASE}\n")
    if answer is not None:
        locked = probe.text("/etc/dnf/plugins/versionlock.list") or ""
        for line in answer[1].splitlines():
            name, version = line.split("\t")
            if name in found or _DRIVER_PACKAGE.search(name):
                found[name] = {"version": version, "held": f"{name}-" in locked}
    return found


def files(probe, wanted):
    """Return ``{path: {"sha256", "mode"} | None}``; None for a file that is not there."""
    found = {}
    for name in wanted:
        path = probe.path(name)
        try:
            content = path.read_bytes()
            found[name] = {"sha256": hashlib.sha256(content).hexdigest(), "mode": f"{path.stat().st_mode & 0o7777:04o}"}
        except OSError:
            found[name] = None
    return found


def units(probe, wanted):
    """Return ``{unit: {"load", "active", "enabled"}}`` from one question to systemd."""
    found = {name: {"load": "unknown", "active": "unknown", "enabled": "unknown"} for name in wanted}
    if not wanted:
        return found
    answer = probe.command("systemctl", "show", "--property", "LoadState,ActiveState,UnitFileState", *wanted)
    if answer is None:
        return found
    blocks = answer[1].strip().split("\n\n")
    for name, block in zip(wanted, blocks):
        values = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        found[name] = {
            "load": values.get("LoadState", "unknown"),
            "active": values.get("ActiveState", "unknown"),
            "enabled": values.get("UnitFileState") or "not-found",
        }
    return found


def _module_on_disk(probe):
    answer = probe.command("modinfo", "nvidia")
    if answer is None or answer[0] != 0:
        return {}
    return {
        name.strip(): value.strip()
        for name, separator, value in (line.partition(":") for line in answer[1].splitlines())
        if separator and name.strip() in ("version", "license", "description")
    }


def _loaded_version(probe):
    match = _NVRM_VERSION.search(probe.text("/proc/driver/nvidia/version") or "")
    if match:
        return match["version"], "open" if match["open"] else "proprietary"
    return (probe.text("/sys/module/nvidia/version") or "").strip() or None, None


def _userspace_version(probe):
    for pattern in ("/usr/lib/*/libnvidia-ml.so.1", "/usr/lib64/libnvidia-ml.so.1", "/usr/lib/libnvidia-ml.so.1"):
        for link in probe.glob(pattern):
            version = link.resolve().name.partition(".so.")[2]
            if "." in version:
                return version
    return None


def _device_holders(probe):
    holders = {}
    for entry in probe.glob("/proc/[0-9]*/fd/*"):
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        if target.startswith("/dev/nvidia"):
            pid = int(entry.parent.parent.name)
            holders[pid] = {"pid": pid, "name": (probe.text(f"/proc/{pid}/comm") or "?").strip()}
    return [holders[pid] for pid in sorted(holders)]


def _headers_present(probe):
    """Whether a module can be built for the running kernel; None on a host that has no kernel of its own."""
    modules = f"/lib/modules/{os.uname().release}"
    if not probe.path(modules).is_dir():
        return None  # a container, or a kernel that no package of this host brought
    return probe.path(f"{modules}/build").exists()  # follows the link, which outlives removed headers


def _secure_boot(probe):
    """Whether Secure Boot is on; None when mokutil, the only one asked, cannot tell."""
    answer = probe.command("mokutil", "--sb-state")
    said = "" if answer is None else answer[1] + answer[2]
    if "SecureBoot enabled" in said:
        return True
    if "SecureBoot disabled" in said or not probe.path("/sys/firmware/efi").is_dir():
        return False
    return None


# Where dkms leaves the public key it signs with: its own default, and Ubuntu's.
_SIGNING_KEYS = ("/var/lib/dkms/mok.pub", "/var/lib/shim-signed/mok/MOK.der")


def _key_enrolled(probe):
    """Whether a key of local modules is enrolled; None when there is none or mokutil does not tell.

    mokutil exits 1 for an enrolled key and 0 for one that is not, so its words count. A key that waits for the
    confirmation at the console is called "already in the enrollment request".
    """
    enrolled = None
    for key in _SIGNING_KEYS:
        answer = probe.command("mokutil", "--test-key", key) if probe.path(key).exists() else None
        said = "" if answer is None else answer[1] + answer[2]
        if "is already enrolled" in said:
            return True
        if "is not enrolled" in said or "in the enrollment request" in said:
            enrolled = False
    return enrolled


def _runfile(probe):
    """Whether an uninstaller lies there that no package owns: the trace of an installation by .run file."""
    found = [*probe.glob("/usr/bin/nvidia-uninstall"), *probe.glob("/usr/lib/nvidia/*uninstall")]
    for path in found:
        name = f"/{path.relative_to(probe.root)}"
        for question in (("dpkg-query", "--search", name), ("rpm", "--query", "--file", name)):
            answer = probe.command(*question)
            if answer is not None:
                if answer[0] == 1:
                    return True
                break
    return False


def driver(probe):
    """Return the driver as packaged on disk, as loaded, and as the userspace library.

    With it goes what can keep a change from working: Secure Boot, missing headers, a .run file. Not looked at, since
    neither can be read cheaply: the module's version inside the initramfs, and parameters that differ from the loaded.
    """
    on_disk = _module_on_disk(probe)
    loaded, flavour = _loaded_version(probe)
    smi = probe.command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    secure_boot = _secure_boot(probe)
    if flavour is None and on_disk.get("license"):
        flavour = "open" if "GPL" in on_disk["license"] else "proprietary"
    return {
        "on_disk": on_disk.get("version"),
        "loaded": loaded,
        "flavour": flavour,
        "userspace": _userspace_version(probe),
        "smi_rc": None if smi is None else smi[0],
        "smi_message": "" if smi is None or smi[0] == 0 else (smi[1] + smi[2]).strip().replace("\n", " "),
        "standin": "stand-in" in on_disk.get("description", "").lower(),
        "holders": _device_holders(probe) if loaded else [],
        "secure_boot": secure_boot,
        "key_enrolled": _key_enrolled(probe) if secure_boot else None,
        "headers_present": _headers_present(probe),
        "runfile": _runfile(probe),
    }


_GPU_FIELDS = "index,name,uuid,memory.total,memory.used"


def gpus(probe):
    """Return one row per GPU; memory in MiB. Empty when nvidia-smi cannot answer."""
    answer = probe.command("nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader,nounits")
    if answer is None or answer[0] != 0:
        return []

    def number(text):
        return int(text) if text.strip().isdigit() else None

    return [
        {
            "index": number(row[0]),
            "name": row[1].strip(),
            "uuid": row[2].strip(),
            "memory_total_mib": number(row[3]),
            "memory_used_mib": number(row[4]),
        }
        for row in csv.reader(answer[1].splitlines())
        if len(row) == 5
    ]


def kernel_modules(probe, wanted):
    """Return ``{module: {"loaded", "version", "refcnt"}}`` as /sys/module has them."""
    found = {}
    for name in wanted:
        base = f"/sys/module/{name.replace('-', '_')}"
        refcnt = (probe.text(f"{base}/refcnt") or "").strip()
        found[name] = {
            "loaded": probe.path(base).is_dir(),
            "version": (probe.text(f"{base}/version") or "").strip() or None,
            "refcnt": int(refcnt) if refcnt.isdigit() else None,
        }
    return found


def rdma_devices(probe):
    """Return one row per RDMA port: state and link layer as the kernel names them."""
    rows = []
    for port in probe.glob("/sys/class/infiniband/*/ports/*"):
        name = port.parent.parent.name
        base = f"/sys/class/infiniband/{name}/ports/{port.name}"
        rows.append(
            {
                "name": name,
                "port": int(port.name),
                "state": (probe.text(f"{base}/state") or "").rpartition(":")[2].strip() or None,
                "link_layer": (probe.text(f"{base}/link_layer") or "").strip() or None,
            }
        )
    return rows


def _socket_owners(probe, inodes):
    owners = {}
    if not inodes:
        return owners
    for entry in probe.glob("/proc/[0-9]*/fd/*"):
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        if target.startswith("socket:[") and target[8:-1] in inodes:
            owners[target[8:-1]] = int(entry.parent.parent.name)
    return owners


def _listen_address(text):
    if len(text) == 8:
        return socket.inet_ntop(socket.AF_INET, bytes.fromhex(text)[::-1])
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, 32, 8)]
    return socket.inet_ntop(socket.AF_INET6, b"".join(words))


def listening(probe, ports):
    """Return who listens on the given TCP ports: address, port, process id and name."""
    rows = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (probe.text(table) or "").splitlines()[1:]:
            fields = line.split()
            address, _, port = fields[1].partition(":")
            if fields[3] == _LISTEN and int(port, 16) in ports:
                rows.append({"address": _listen_address(address), "port": int(port, 16), "inode": fields[9]})
    owners = _socket_owners(probe, {row["inode"] for row in rows})
    for row in rows:
        pid = owners.get(row.pop("inode"))
        row["pid"] = pid
        row["process"] = (probe.text(f"/proc/{pid}/comm") or "").strip() if pid else None
    return rows


def addresses(probe):
    """Return ``{interface: [address, ...]}``, loopback left out."""
    found = {}
    for link in probe.json_command("ip", "-json", "address", "show") or []:
        if link.get("ifname") != "lo":
            found[link["ifname"]] = [row["local"] for row in link.get("addr_info", []) if row.get("scope") == "global"]
    return found


def runtime(probe):
    """Return Docker's version, the place its images lie in with the room left there, and daemon.json as parsed."""
    info = probe.json_command("docker", "info", "--format", "{{json .}}") or {}
    root_dir = info.get("DockerRootDir") or None
    store = Path(root_dir or "/var/lib/docker")
    while not probe.path(store).exists() and store != store.parent:
        store = store.parent
    room = os.statvfs(probe.path(store))
    daemon, daemon_error = None, None
    text = probe.text("/etc/docker/daemon.json")
    if text is not None:
        try:
            daemon = json.loads(text or "{}")
        except ValueError as error:
            daemon_error = str(error)
    return {
        "docker_version": info.get("ServerVersion") or None,
        "root_dir": root_dir,
        "store_path": str(store),
        "free_bytes": room.f_bavail * room.f_frsize,
        # Filesystems without a fixed inode table (btrfs, some network ones) report 0 of 0.
        "free_inodes": room.f_favail if room.f_files else None,
        "daemon": daemon,
        "daemon_error": daemon_error,
    }


def image(probe, reference):
    """Return whether the runtime holds an image reference, with its digests; None when nobody asked."""
    if not reference:
        return None
    rows = probe.json_command("docker", "image", "inspect", reference) or []
    first = rows[0] if rows else {}
    return {
        "reference": reference,
        "present": bool(rows),
        "repo_digests": first.get("RepoDigests") or [],
        "architecture": first.get("Architecture"),
        "size_bytes": first.get("Size"),
    }


def _shown(args):
    """Return command-line arguments with the values of secret options blotted out."""
    shown = []
    for argument in args:
        name, equals, _ = argument.partition("=")
        if equals and name in _SECRET_OPTIONS:
            shown.append(f"{name}={_NOT_SHOWN}")
        else:
            shown.append(_NOT_SHOWN if shown and shown[-1] in _SECRET_OPTIONS else argument)
    return shown


def engine_container(probe, name, container_files):
    """Return what the engine's container really runs with: image, arguments, steering environment, settings files."""
    rows = probe.json_command("docker", "container", "inspect", name) or [] if name else []
    if not rows:
        return None
    row = rows[0]
    pid = row["State"].get("Pid") or None
    environment = dict(entry.split("=", 1) for entry in row["Config"].get("Env") or [] if "=" in entry)
    inside = files(probe, [f"/proc/{pid}/root{path}" for path in container_files]) if pid else {}
    images = probe.json_command("docker", "image", "inspect", row["Image"]) or [{}]
    return {
        "name": name,
        "id": row["Id"],
        "image_reference": row["Config"].get("Image"),
        "image_repo_digests": images[0].get("RepoDigests") or [],
        "started_at": row["State"].get("StartedAt"),
        "pid": pid,
        "args": _shown(row.get("Args") or []),
        "env": {
            key: value
            for key, value in sorted(environment.items())
            if _ENGINE_ENV.fullmatch(key) and not _SECRET_NAME.search(key)
        },
        "restart_count": row.get("RestartCount", 0),
        "files": {
            path: (inside.get(f"/proc/{pid}/root{path}") or {}).get("sha256") if pid else None
            for path in container_files
        },
    }
