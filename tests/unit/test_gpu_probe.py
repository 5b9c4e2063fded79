"""What nvidia-smi says of GPUs.

The report is cut down from `nvidia-smi -q -x` as the 570 and 580 branches print it; the H200's values are constructed.
"""

import gpu_probe
import pytest
from host_tree import Tree

GPU = """
<gpu id="00000000:1B:00.0">
  <product_name>NVIDIA H200</product_name><minor_number>3</minor_number><uuid>GPU-1</uuid>
  <pci><pci_bus_id>00000000:1B:00.0</pci_bus_id></pci>
  <fb_memory_usage><total>143771 MiB</total><reserved>600 MiB</reserved><used>91234 MiB</used></fb_memory_usage>
  <ecc_mode><current_ecc>Enabled</current_ecc><pending_ecc>Enabled</pending_ecc></ecc_mode>
  <ecc_errors>
    <volatile><sram_correctable>9</sram_correctable><sram_uncorrectable_parity>1</sram_uncorrectable_parity>
      <sram_uncorrectable_secded>0</sram_uncorrectable_secded><dram_uncorrectable>2</dram_uncorrectable></volatile>
    <aggregate><sram_uncorrectable_parity>N/A</sram_uncorrectable_parity><dram_uncorrectable>7</dram_uncorrectable>
      <sram_threshold_exceeded>No</sram_threshold_exceeded></aggregate>
  </ecc_errors>
  <remapped_rows><remapped_row_pending>No</remapped_row_pending>
    <remapped_row_failure>Yes</remapped_row_failure></remapped_rows>
  <fabric><state>Completed</state><status>Success</status><cliqueId>184</cliqueId>
    <clusterUuid>5cd30dc8-0000-0000-0000-000000000000</clusterUuid></fabric>
  <processes><process_info><pid>4711</pid><type>C</type><process_name>VLLM::Worker_TP0 --x</process_name>
    <used_memory>90000 MiB</used_memory></process_info></processes>
</gpu>
"""
HEAD = '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n'
REPORT = f"{HEAD}<nvidia_smi_log><driver_version>580.95.05</driver_version>{GPU}</nvidia_smi_log>\n"
BARE = f"{HEAD}<nvidia_smi_log><gpu id='00000000:01:00.0'><product_name>NVIDIA L4</product_name></gpu></nvidia_smi_log>"
CSV = "0, NVIDIA B300 (simulated), GPU-2, 275040, 0, 00000000:1B:00.0, Enabled, 0, 0, 0, 1\n"


def test_the_report_answers_everything(tmp_path):
    tree = Tree(tmp_path)
    tree.say("nvidia-smi -q -x", REPORT)
    probe = tree.probe()
    assert gpu_probe.gpus(probe) == [
        {
            "index": 0,
            "name": "NVIDIA H200",
            "uuid": "GPU-1",
            "pci": "00000000:1B:00.0",
            "memory_total_mib": 143771,
            "memory_used_mib": 91234,
            "ecc": {"mode": "Enabled", "uncorrected_volatile": 3, "uncorrected_aggregate": 7},
            "remap": {"pending": False, "failed": True},
            "processes": [{"pid": 4711, "name": "VLLM::Worker_TP0", "used_mib": 90000}],
        }
    ]
    assert gpu_probe.gpu_fabric(probe) == [
        {
            "index": 0,
            "state": "Completed",
            "status": "Success",
            "cluster_uuid": "5cd30dc8-0000-0000-0000-000000000000",
            "clique_id": "184",
        }
    ]
    assert probe.errors == []


def test_what_a_gpu_does_not_say_is_unknown(tmp_path):
    tree = Tree(tmp_path)
    tree.say("nvidia-smi -q -x", BARE)
    (row,) = gpu_probe.gpus(tree.probe())
    assert (row["name"], row["pci"]) == ("NVIDIA L4", "00000000:01:00.0")
    assert {key for key, value in row.items() if value is None} == {
        *("uuid", "memory_total_mib", "memory_used_mib", "ecc", "remap"),
    }


@pytest.mark.parametrize(
    ("rc", "out", "errors"),
    [
        pytest.param(2, "Invalid combination of input arguments.", [], id="does-not-know-the-question"),
        pytest.param(0, REPORT[:900], ["nvidia-smi -q -x"], id="cut-off"),
        pytest.param(0, "\0\ufffd garbage", ["nvidia-smi -q -x"], id="garbage"),
    ],
)
def test_without_a_report_the_table_answers(tmp_path, rc, out, errors):
    tree = Tree(tmp_path)
    tree.say("nvidia-smi -q -x", out, rc=rc)
    tree.say("nvidia-smi", CSV)
    probe = tree.probe()
    (row,) = gpu_probe.gpus(probe)
    assert (row["uuid"], row["pci"], row["memory_total_mib"]) == ("GPU-2", "00000000:1B:00.0", 275040)
    assert row["remap"] == {"pending": False, "failed": True}
    assert row["processes"] is None
    assert gpu_probe.gpu_fabric(probe) is None  # the table has no such column, so it was not told
    assert [error["probe"] for error in probe.errors] == errors


def test_a_table_of_garbage_is_an_error(tmp_path):
    tree = Tree(tmp_path)
    tree.say("nvidia-smi", "\ufffd\ufffd\n1, 2\n")
    probe = tree.probe()
    assert gpu_probe.gpus(probe) == []
    assert [error["message"] for error in probe.errors][1] == "2 of its 2 lines are not a GPU's"


def test_a_version_mismatch_keeps_its_status_and_its_words(tmp_path):
    tree = Tree(tmp_path)
    said = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.95\n"
    tree.say("nvidia-smi", said, rc=18)
    asked = gpu_probe.smi(tree.probe())
    assert (asked["rc"], asked["gpus"]) == (18, [])
    assert asked["message"] == " ".join(said.split())
    assert gpu_probe.gpu_fabric(tree.probe()) is None


def test_a_hanging_nvidia_smi_is_asked_once(tmp_path):
    tree = Tree(tmp_path)
    tree.say("nvidia-smi", rc="timeout")
    probe = tree.probe(timeout_s=2)
    assert gpu_probe.gpus(probe) == []
    assert gpu_probe.gpu_fabric(probe) is None
    assert probe.errors == [{"probe": "nvidia-smi", "message": "no answer within 6 s"}]


def test_accelerators_are_seen_without_a_driver(tmp_path):
    tree = Tree(tmp_path)
    for address, vendor, kind, device in [
        ("0000:1b:00.0", "0x10de", "0x030200", "0x2335"),
        ("0000:05:00.0", "0x1002", "0x120000", "0x75a3"),
        ("0000:07:00.0", "0x10de", "0x068000", "0x22a3"),  # an NVSwitch
        ("0000:08:00.0", "0x15b3", "0x020700", "0x1021"),
    ]:
        base = f"/sys/bus/pci/devices/{address}"
        for name, text in (("vendor", vendor), ("class", kind), ("device", device)):
            tree.put(f"{base}/{name}", f"{text}\n")
    tree.link("/sys/bus/pci/devices/0000:1b:00.0/driver", "../../../bus/pci/drivers/nvidia")
    assert gpu_probe.accelerators(tree.probe()) == [
        {"pci": "0000:05:00.0", "vendor": "0x1002", "device": "0x75a3", "driver": None},
        {"pci": "0000:1b:00.0", "vendor": "0x10de", "device": "0x2335", "driver": "nvidia"},
    ]
