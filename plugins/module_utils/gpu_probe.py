"""GPUs: what nvidia-smi says of each, asked once; and which GPUs sit on the PCI bus whether or not it answers.

Shape of ``nvidia-smi -q -x``: read from captured reports of 570 and 580; tags as the 580 branch prints them, and
``sram_uncorrectable`` of GPUs before Ampere.
"""

from __future__ import annotations

import csv

from ansible.module_utils.host_probe import whole
from ansible.module_utils.redaction import text as shown

_MOST_PROCESSES = 64
_CSV_FIELDS = (
    "index,name,uuid,memory.total,memory.used,pci.bus_id,ecc.mode.current,ecc.errors.uncorrected.volatile.total,"
    "ecc.errors.uncorrected.aggregate.total,remapped_rows.pending,remapped_rows.failure"
)
_USAGE = 2  # nvidia-smi's exit status for arguments it does not know
_DISPLAY, _ACCELERATOR = "0x03", "0x12"  # PCI classes of GPUs; AMD's MI300 family is of the second
_GPU_VENDORS = ("0x10de", "0x1002")


def smi(probe):
    """Return ``{"rc", "message", "gpus", "report"}`` from one call; rc is None when nvidia-smi is missing or hangs.

    The XML report answers everything (``report`` is true). Where it cannot be read, the CSV query is asked for the
    plain facts.
    """
    return probe.once("nvidia-smi", lambda: _ask(probe))


def _ask(probe):
    limit_s = 3 * probe.timeout_s  # without persistence it wakes every GPU first, seconds each
    answer = probe.command("nvidia-smi", "-q", "-x", timeout_s=limit_s)
    if answer is None:
        return {"rc": None, "message": "", "gpus": [], "report": False}
    if answer[0] == 0:
        rows = _from_xml(probe, answer[1])
        if rows is not None:
            return {"rc": 0, "message": "", "gpus": rows, "report": True}
    if answer[0] in (0, _USAGE):
        answer = probe.command(
            "nvidia-smi", f"--query-gpu={_CSV_FIELDS}", "--format=csv,noheader,nounits", timeout_s=limit_s
        )
    if answer is None or answer[0] != 0:
        rc, said = (None, "") if answer is None else (answer[0], answer[1] + answer[2])
        return {"rc": rc, "message": shown(" ".join(said.split())[:500]), "gpus": [], "report": False}
    return {"rc": 0, "message": "", "gpus": _from_csv(probe, answer[1]), "report": False}


def gpus(probe):
    """Return one row per GPU; memory in MiB. Empty when nvidia-smi cannot answer."""
    return [{key: value for key, value in row.items() if key != "fabric"} for row in smi(probe)["gpus"]]


def gpu_fabric(probe):
    """Return the Fabric block of every GPU that has one; None when nvidia-smi gave no report."""
    asked = smi(probe)
    return [row["fabric"] for row in asked["gpus"] if row["fabric"]] if asked["report"] else None


def _from_xml(probe, report):
    import xml.etree.ElementTree as ET  # noqa: PLC0415 - only needed here; the driver's own tool wrote it

    try:
        root = ET.fromstring(report[report.index("<nvidia_smi_log") :])  # noqa: S314 - no entities: DOCTYPE is cut off
        return [_gpu(index, gpu) for index, gpu in enumerate(root.findall("gpu"))]
    except (ValueError, ET.ParseError) as error:
        probe.error("nvidia-smi -q -x", f"did not print its report: {error}")
        return None


def _gpu(index, gpu):
    def told(path):
        found = (gpu.findtext(path) or "").strip()
        return None if found in ("", "N/A", "[N/A]", "Requested functionality has been deprecated") else found

    ecc, remap, fabric = told("ecc_mode/current_ecc"), told("remapped_rows/remapped_row_pending"), gpu.find("fabric")
    return {
        "index": index,
        "name": told("product_name"),
        "uuid": told("uuid"),
        "pci": told("pci/pci_bus_id") or gpu.get("id"),
        "memory_total_mib": _mib(told("fb_memory_usage/total")),
        "memory_used_mib": _mib(told("fb_memory_usage/used")),
        "ecc": {
            "mode": ecc,
            "uncorrected_volatile": _uncorrected(gpu.find("ecc_errors/volatile")),
            "uncorrected_aggregate": _uncorrected(gpu.find("ecc_errors/aggregate")),
        }
        if ecc
        else None,
        "remap": {"pending": _yes(remap), "failed": _yes(told("remapped_rows/remapped_row_failure"))}
        if remap
        else None,
        "processes": [
            {
                "pid": whole(one.findtext("pid")),
                "name": shown((one.findtext("process_name") or "?").split(" ")[0][:100]),
                "used_mib": _mib(one.findtext("used_memory")),
            }
            for one in gpu.findall("processes/process_info")[:_MOST_PROCESSES]
            if whole(one.findtext("pid")) is not None
        ],
        "fabric": None
        if fabric is None
        else {
            "index": index,
            "state": told("fabric/state"),
            "status": told("fabric/status"),
            "cluster_uuid": told("fabric/clusterUuid") or told("fabric/cluster_uuid"),
            "clique_id": told("fabric/cliqueId") or told("fabric/clique_id"),
        },
    }


def _mib(text):
    return whole((text or "").replace("MiB", ""))


def _yes(text):
    return {"Yes": True, "No": False}.get(text)


def _uncorrected(block):
    """Return the sum of the uncorrectable counters of one block, None where none is counted."""
    numbers = [] if block is None else [whole(part.text) for part in block if "uncorrectable" in part.tag]
    numbers += [] if block is None else [whole(part.findtext("total")) for part in block.findall("double_bit")]
    told = [number for number in numbers if number is not None]
    return sum(told) if told else None


def _from_csv(probe, report):
    rows = [[cell.strip() for cell in row] for row in csv.reader(report.splitlines()) if row]
    kept = [row for row in rows if len(row) == _CSV_FIELDS.count(",") + 1 and whole(row[0]) is not None]
    if len(kept) < len(rows):
        probe.error("nvidia-smi --query-gpu", f"{len(rows) - len(kept)} of its {len(rows)} lines are not a GPU's")
    return [
        {
            "index": whole(row[0]),
            "name": row[1],
            "uuid": row[2],
            "pci": row[5],
            "memory_total_mib": whole(row[3]),
            "memory_used_mib": whole(row[4]),
            "ecc": {"mode": row[6], "uncorrected_volatile": whole(row[7]), "uncorrected_aggregate": whole(row[8])}
            if row[6] in ("Enabled", "Disabled")
            else None,
            "remap": {"pending": bool(whole(row[9])), "failed": bool(whole(row[10]))}
            if whole(row[9]) is not None
            else None,
            "processes": None,
            "fabric": None,
        }
        for row in kept
    ]


def accelerators(probe):
    """Return GPUs of NVIDIA and AMD on the PCI bus with vendor, device and the kernel driver bound to them."""
    rows = []
    for address in probe.names("/sys/bus/pci/devices"):
        base = f"/sys/bus/pci/devices/{address}"
        vendor = probe.line(f"{base}/vendor")
        if vendor in _GPU_VENDORS and (probe.line(f"{base}/class") or "").startswith((_DISPLAY, _ACCELERATOR)):
            driver = probe.path(f"{base}/driver")
            rows.append(
                {
                    "pci": address,
                    "vendor": vendor,
                    "device": probe.line(f"{base}/device"),
                    "driver": driver.readlink().name if driver.is_symlink() else None,
                }
            )
    return rows
