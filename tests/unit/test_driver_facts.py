"""What the driver probe reports beside the versions: initramfs, dkms, parameters, toolkits, the next kernel.

Command output is constructed in the words of modinfo (kmod 29 to 34), dkms 2.8 and 3, and NVIDIA's 580 branch.
"""

import gzip
import lzma
import shutil
import subprocess
import zlib

import driver_probe
import initramfs_probe
import pytest
from host_tree import Tree

OLD, NEW = "6.8.0-90-generic", "6.8.0-101-generic"
MODINFO = "filename:       /lib/modules/x/nvidia.ko\nversion:        {}\nlicense:        Dual MIT/GPL\n"


def test_the_module_of_the_next_kernel_is_asked_for(tmp_path):
    tree = Tree(tmp_path)
    tree.put("/proc/sys/kernel/osrelease", f"{OLD}\n")
    for name in (OLD, NEW):
        tree.put(f"/boot/vmlinuz-{name}")
    tree.say("modinfo nvidia", MODINFO.format("580.95.05"))
    tree.say(f"modinfo -k {NEW} nvidia", rc=1, err="modinfo: ERROR: Module nvidia not found.\n")
    seen = driver_probe.driver(tree.probe())
    assert (seen["on_disk"], seen["license"]) == ("580.95.05", "Dual MIT/GPL")
    assert seen["on_disk_next"] == {"kernel": NEW, "version": None}


def test_when_the_running_kernel_boots_next_modinfo_is_asked_once(tmp_path):
    tree = Tree(tmp_path)
    tree.put("/proc/sys/kernel/osrelease", f"{NEW}\n")
    tree.put(f"/boot/vmlinuz-{NEW}")
    tree.say("modinfo nvidia", MODINFO.format("580.95.05"))
    assert driver_probe.driver(tree.probe())["on_disk_next"] == {"kernel": NEW, "version": "580.95.05"}


@pytest.mark.parametrize(
    ("rc", "out", "rows"),
    [
        pytest.param(
            0,
            f"nvidia/580.95.05, {OLD}, x86_64: installed (WARNING! Diff between built and installed module!)\n"
            "nvidia, 570.133.20: added\n",
            [
                {"module": "nvidia", "version": "580.95.05", "kernel": OLD, "state": "installed"},
                {"module": "nvidia", "version": "570.133.20", "kernel": None, "state": "added"},
            ],
            id="both-spellings",
        ),
        pytest.param(0, "", [], id="no-modules"),
        pytest.param(3, "Error! Could not locate dkms.conf\n", None, id="fails"),
        pytest.param("timeout", "", None, id="hangs"),
    ],
)
def test_dkms(tmp_path, rc, out, rows):
    tree = Tree(tmp_path)
    tree.say("dkms status", out, rc=rc)
    probe = tree.probe()
    assert driver_probe.driver(probe)["dkms"] == rows
    assert ("dkms" in " ".join(error["probe"] for error in probe.errors)) is (rows is None)


def test_no_dkms_program_is_no_module_and_no_error(tmp_path):
    probe = Tree(tmp_path).probe()
    assert driver_probe.driver(probe)["dkms"] == []
    assert probe.errors == []


def test_parameters_loaded_and_wanted_line_up(tmp_path):
    tree = Tree(tmp_path)
    tree.put(
        "/proc/driver/nvidia/params", 'EnableGpuFirmware: 18\nCoherentGPUMemoryMode: "driver"\nRegistryDwords: ""\n'
    )
    tree.put(
        "/etc/modprobe.d/kimi.conf",
        "# options nvidia NVreg_Old=1\n"
        "options nvidia NVreg_CoherentGPUMemoryMode=driver \\\n  NVreg_CreateImexChannel0=1\n",
    )
    tree.put("/usr/lib/modprobe.d/kimi.conf", "options nvidia NVreg_Shadowed=1\n")
    tree.put("/usr/lib/modprobe.d/nvidia.conf", "blacklist nouveau\noptions nouveau modeset=0\n")
    seen = driver_probe.driver(tree.probe())
    assert seen["params"] == {"EnableGpuFirmware": "18", "CoherentGPUMemoryMode": "driver", "RegistryDwords": ""}
    assert seen["params_wanted"] == {"CoherentGPUMemoryMode": "driver", "CreateImexChannel0": "1"}
    assert seen["nouveau"] == {"loaded": False, "blacklisted": True}


@pytest.mark.parametrize(
    ("path", "text", "blacklisted"),
    [
        pytest.param("/proc/cmdline", "ro modprobe.blacklist=nouveau,nova_core\n", True, id="command-line"),
        pytest.param("/proc/cmdline", "ro rd.driver.blacklist=nouveau\n", True, id="dracut"),
        pytest.param("/etc/modprobe.d/a.conf", "install nouveau /bin/false\n", True, id="install-false"),
        pytest.param("/etc/modprobe.d/a.conf", "#blacklist nouveau\n", False, id="comment"),
        pytest.param("/etc/modprobe.d/a.conf.bak", "blacklist nouveau\n", False, id="no-conf"),
    ],
)
def test_nouveau(tmp_path, path, text, blacklisted):
    tree = Tree(tmp_path)
    tree.put(path, text)
    (tmp_path / "sys/module/nouveau").mkdir(parents=True)
    assert driver_probe.driver(tree.probe())["nouveau"] == {"loaded": True, "blacklisted": blacklisted}


def test_a_toolkit_is_told_apart_from_what_is_none(tmp_path):
    tree = Tree(tmp_path)
    tree.put("/usr/local/cuda-13.0/version.json", '{"cuda": {"name": "CUDA SDK", "version": "13.0.2"}}')
    tree.put("/usr/local/cuda-12.4/bin/nvcc")
    tree.put("/usr/local/cuda-12.1/lib64/libcudart.so.12")
    tree.link("/usr/local/cuda", "/usr/local/cuda-13.0")
    assert driver_probe.driver(tree.probe())["toolkit"] == [
        {"path": "/usr/local/cuda-12.4", "version": "12.4"},
        {"path": "/usr/local/cuda-13.0", "version": "13.0.2"},
    ]


def test_libraries_of_two_versions_are_both_named(tmp_path):
    tree = Tree(tmp_path)
    for version in ("570.133.20", "580.95.05"):
        tree.put(f"/usr/lib64/libcuda.so.{version}")
        tree.put(f"/usr/lib64/libnvidia-ml.so.{version}")
    tree.link("/usr/lib64/libnvidia-ml.so.1", "libnvidia-ml.so.580.95.05")
    tree.put("/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.133.20  Sat\n")
    tree.say(
        "nvidia-smi", "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.95", rc=18
    )
    seen = driver_probe.driver(tree.probe())
    assert seen["libcuda"] == ["570.133.20", "580.95.05"]
    assert (seen["userspace"], seen["nvml"], seen["smi_rc"]) == ("580.95.05", "580.95", 18)


def test_nvidia_smi_is_not_asked_while_the_module_is_not_loaded(tmp_path):
    """It would load the module, and a snapshot changes nothing."""
    tree = Tree(tmp_path)
    tree.say("nvidia-smi", "NVIDIA-SMI has failed", rc=9)
    assert driver_probe.driver(tree.probe())["smi_rc"] is None


def cpio(members: dict[str, bytes]) -> bytes:
    """Return a cpio archive in the format initramfs images have (newc)."""
    out = b""
    for name, content in [*members.items(), ("TRAILER!!!", b"")]:
        head = [0, 0o100644, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0]
        entry = b"070701" + b"".join(b"%08X" % number for number in head) + name.encode() + b"\0"
        out += entry + b"\0" * (-len(entry) % 4) + content + b"\0" * (-len(content) % 4)
    return out + b"\0" * (-len(out) % 512)


def module(version: str) -> bytes:
    return b"\x7fELF" + b"\0" * 5000 + f"\0version={version}\0license=Dual MIT/GPL\0".encode()


FILES = {"kernel": b"x" * 70001, "usr/lib/modules/x/updates/dkms/nvidia.ko": module("570.133.20"), "etc/z": b"z" * 9}
EARLY = cpio({"kernel/x86/microcode/GenuineIntel.bin": b"\xff" * 4097})


@pytest.mark.parametrize(
    ("image", "versions"),
    [
        pytest.param(cpio(FILES), ["570.133.20"], id="plain"),
        pytest.param(EARLY + gzip.compress(cpio(FILES)), ["570.133.20"], id="microcode-then-gzip"),
        pytest.param(EARLY + EARLY + lzma.compress(cpio(FILES)), ["570.133.20"], id="two-early-ones-then-xz"),
        pytest.param(
            cpio({"usr/lib/modules/x/nvidia.ko.xz": lzma.compress(module("580.95.05"))}), ["580.95.05"], id="module-xz"
        ),
        pytest.param(gzip.compress(cpio({"usr/lib/modules/x/nvidia-uvm.ko": module("1.2")})), [], id="no-such-module"),
        pytest.param(cpio({"a/nvidia.ko": b"stripped"}), ["unknown"], id="module-without-version"),
        pytest.param(b"", [], id="empty"),
    ],
)
def test_the_module_inside_an_initramfs(tmp_path, image, versions):
    tree = Tree(tmp_path)
    tree.put(f"/boot/initrd.img-{OLD}", image)
    probe = tree.probe()
    assert initramfs_probe.initramfs(probe, [OLD, None, NEW, OLD]) == [{"kernel": OLD, "versions": versions}]
    assert probe.errors == []


@pytest.mark.skipif(shutil.which("zstd") is None, reason="zstd is not installed")
def test_an_initramfs_compressed_by_zstd(tmp_path):
    image = subprocess.run(["zstd", "-c"], input=cpio(FILES), capture_output=True, check=True).stdout
    Tree(tmp_path).put(f"/boot/initramfs-{OLD}.img", EARLY + image)
    seen = initramfs_probe.initramfs(Tree(tmp_path).probe(), [OLD])
    assert seen == [{"kernel": OLD, "versions": ["570.133.20"]}]


@pytest.mark.parametrize(
    ("image", "message"),
    [
        pytest.param(b"\x01\x02garbage", "compressed in an unknown way", id="garbage"),
        pytest.param(gzip.compress(b"no archive" * 50), "not a cpio archive", id="no-archive-inside"),
        pytest.param(EARLY + gzip.compress(cpio(FILES))[:200], "cut off before its end", id="cut-off"),
        pytest.param(b"\x1f\x8b" + b"\xff" * 100, zlib.error.__name__, id="broken-gzip"),
    ],
)
def test_a_broken_initramfs_is_an_error_and_no_answer(tmp_path, image, message):
    tree = Tree(tmp_path)
    tree.put(f"/boot/initrd.img-{OLD}", image)
    probe = tree.probe()
    seen = initramfs_probe.initramfs(probe, [OLD])
    assert seen is None
    assert len(probe.errors) == 1
    assert message in probe.errors[0]["message"]


def test_a_host_without_initramfs_was_looked_at(tmp_path):
    assert initramfs_probe.initramfs(Tree(tmp_path).probe(), [OLD]) == []
