"""Kernels, boot loaders, IOMMU and ACS, from constructed trees in the layout of each distribution."""

import kernel_probe
import pytest
from host_tree import Tree

OLD, NEW = "6.8.0-90-generic", "6.8.0-101-generic"
EL_OLD, EL_NEW = "5.14.0-503.11.1.el9_5.x86_64", "5.14.0-570.el9.x86_64"
MENU = f"menuentry 'Ubuntu' {{\n\tlinux\t/boot/vmlinuz-{NEW} root=UUID=1 ro quiet\n}}\n\tlinux /boot/vmlinuz-{OLD} ro\n"


def two_kernels(tree: Tree, *names: str) -> None:
    for name in names:
        tree.put(f"/boot/vmlinuz-{name}")
        tree.put(f"/lib/modules/{name}/modules.order")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({"/boot/grub/grub.cfg": MENU}, NEW, id="first-of-the-menu"),
        pytest.param({"/etc/default/grub": "GRUB_DEFAULT=0\n", "/boot/grub/grub.cfg": MENU}, NEW, id="number-0"),
        pytest.param({}, NEW, id="newest-image"),
        pytest.param(
            {
                "/etc/default/grub": "GRUB_DEFAULT=saved\n",
                "/boot/grub/grubenv": f"saved_entry=gnulinux-advanced-1>gnulinux-{OLD}-advanced-1\n",
                "/boot/grub/grub.cfg": MENU,
            },
            OLD,
            id="saved",
        ),
        pytest.param(
            {"/etc/default/grub": f'GRUB_DEFAULT="1>gnulinux-{OLD}-advanced-1"\n', "/boot/grub/grub.cfg": MENU},
            OLD,
            id="named",
        ),
        pytest.param(
            {
                "/boot/grub/grubenv": f"next_entry=Advanced options>Ubuntu, with Linux {OLD}\n",
                "/boot/grub/grub.cfg": MENU,
            },
            OLD,
            id="once",
        ),
        pytest.param(
            {"/etc/default/grub": 'GRUB_DEFAULT="1>2"\n', "/boot/grub/grub.cfg": MENU},
            None,
            id="number-nobody-can-tell",
        ),
    ],
)
def test_next_kernel_by_menu(tmp_path, files, expected):
    tree = Tree(tmp_path)
    two_kernels(tree, OLD, NEW)
    for path, text in files.items():
        tree.put(path, text)
    assert kernel_probe.next_kernel(tree.probe()) == expected


@pytest.mark.parametrize(
    ("grubenv", "expected"),
    [
        pytest.param(f"saved_entry=0a1b-{EL_OLD}\n", EL_OLD, id="chosen"),
        pytest.param("# GRUB Environment Block\n", EL_NEW, id="newest"),
        pytest.param("saved_entry=gone\n", None, id="an-entry-that-is-not-there"),
    ],
)
def test_next_kernel_by_entries(tmp_path, grubenv, expected):
    tree = Tree(tmp_path)
    tree.put("/boot/grub2/grubenv", grubenv)
    for name in (EL_OLD, EL_NEW):
        tree.put(f"/boot/loader/entries/0a1b-{name}.conf", f"title RHEL\nversion {name}\nlinux /vmlinuz-{name}\n")
    tree.put(
        "/boot/loader/entries/0a1b-0-rescue.conf", "title R\nversion 0-rescue-0a1b\nlinux /vmlinuz-0-rescue-0a1b\n"
    )
    assert kernel_probe.next_kernel(tree.probe()) == expected


def test_kernels_headers_and_command_line(tmp_path):
    tree = Tree(tmp_path)
    two_kernels(tree, OLD, NEW)
    tree.put("/lib/modules/6.5.0-1-generic/updates/dkms/nvidia.ko")  # what a removed kernel leaves behind
    tree.put(f"/usr/src/linux-headers-{OLD}/Makefile")
    tree.link(f"/lib/modules/{OLD}/build", f"/usr/src/linux-headers-{OLD}")
    tree.link(f"/lib/modules/{NEW}/build", f"/usr/src/linux-headers-{NEW}")
    tree.put("/proc/sys/kernel/osrelease", f"{OLD}\n")
    tree.put("/sys/kernel/security/lockdown", "none [integrity] confidentiality\n")
    tree.put("/proc/cmdline", "BOOT_IMAGE=/vmlinuz ro quiet iommu=pt site.token=abc123 hf_AbCdEf0123456789AbCdEf\n")
    assert kernel_probe.kernel(tree.probe()) == {
        "running": OLD,
        "next": NEW,
        "installed": [OLD, NEW],
        "headers": {OLD: True, NEW: False},
        "lockdown": "integrity",
        "cmdline": "BOOT_IMAGE=/vmlinuz ro quiet iommu=pt site.token=(not shown) (not shown)",
    }


def test_nothing_is_taken_from_the_machine_the_tree_lies_on(tmp_path):
    seen = kernel_probe.kernel(Tree(tmp_path).probe())
    assert seen == {"running": None, "next": None, "installed": [], "headers": {}, "lockdown": None, "cmdline": None}


def bridge(tree: Tree, address: str, control: int | None) -> None:
    """Put a PCIe bridge whose extended configuration holds AER, then ACS with this control word (None: no ACS)."""
    config = bytearray(0x200)
    config[0x100:0x104] = (0x0001 | 1 << 16 | 0x148 << 20).to_bytes(4, "little")
    if control is None:
        config[0x148:0x14C] = (0x0003 | 1 << 16).to_bytes(4, "little")
    else:
        config[0x148:0x14C] = (0x000D | 1 << 16).to_bytes(4, "little")
        config[0x14E:0x150] = control.to_bytes(2, "little")
    tree.put(f"/sys/bus/pci/devices/{address}/class", "0x060400\n")
    tree.put(f"/sys/bus/pci/devices/{address}/config", bytes(config))


@pytest.mark.parametrize(
    ("controls", "acs"),
    [
        pytest.param([0x1D, 0], True, id="one-redirects"),
        pytest.param([0, None], False, id="off"),
        pytest.param([], None, id="no-bridge"),
    ],
)
def test_access_control(tmp_path, controls, acs):
    tree = Tree(tmp_path)
    for number, control in enumerate(controls):
        bridge(tree, f"0000:0{number}:00.0", control)
    assert kernel_probe.access_control(tree.probe()) is acs


def test_access_control_without_the_right_to_read_it(tmp_path):
    tree = Tree(tmp_path)
    tree.put("/sys/bus/pci/devices/0000:00:01.0/class", "0x060400\n")
    tree.put("/sys/bus/pci/devices/0000:00:01.0/config", bytes(64))
    assert kernel_probe.access_control(tree.probe()) is None


@pytest.mark.parametrize(
    ("groups", "cmdline", "enabled", "passing"),
    [
        pytest.param({"0": "identity", "1": "identity"}, "", True, True, id="passthrough"),
        pytest.param({"0": "identity", "1": "DMA-FQ"}, "iommu=pt", True, False, id="one-translates"),
        pytest.param({}, "", False, None, id="off"),
        pytest.param(None, "", None, None, id="cannot-tell"),
    ],
)
def test_iommu(tmp_path, groups, cmdline, enabled, passing):
    tree = Tree(tmp_path)
    tree.put("/proc/cmdline", cmdline)
    if groups is not None:
        (tmp_path / "sys/kernel/iommu_groups").mkdir(parents=True)
        for name, kind in groups.items():
            tree.put(f"/sys/kernel/iommu_groups/{name}/type", f"{kind}\n")
    seen = kernel_probe.iommu(tree.probe())
    assert (seen["enabled"], seen["passthrough"]) == (enabled, passing)


def test_headers_of_a_kernel_without_a_folder_of_modules_are_unknown_and_not_missing(tmp_path):
    """A container runs the machine's kernel, which no package of its own brought."""
    tree = Tree(tmp_path)
    tree.put("/proc/sys/kernel/osrelease", f"{OLD}\n")
    assert kernel_probe.kernel(tree.probe())["headers"] == {}
