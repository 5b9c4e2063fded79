"""The proof after a driver change, and what the plan announces of parameters: one value away from a right host."""

import pytest
from judging import spoil
from whole_host import KERNEL, OLD, TARGET, b300

from kimi_runbook.driver_proof import unequal_of
from kimi_runbook.driver_verdict import driver_verdict
from kimi_runbook.snapshot import Snapshot

COMPANIONS = {"nvidia-fabricmanager": f"{TARGET}-1"}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"driver|loaded": OLD}, f"the loaded module is {OLD}"),
        ({"driver|loaded": None}, "the loaded module is none"),
        ({"driver|on_disk": OLD}, f"the module on disk is {OLD}"),
        ({"driver|userspace": OLD}, f"the user-space library is {OLD}"),
        ({"driver|nvml": OLD}, f"NVML is {OLD}"),
        ({"driver|smi_rc": 18}, "nvidia-smi reports a version mismatch (exit status 18)"),
        ({"driver|initramfs": [{"kernel": KERNEL, "versions": [OLD]}]}, f"the initramfs holds {OLD}"),
        (
            {"packages|nvidia-fabricmanager": {"version": f"{OLD}-1", "held": True}},
            f"nvidia-fabricmanager is {OLD}-1, locked is {TARGET}-1",
        ),
    ],
)
def test_every_part_is_compared(change, sentence):
    data = b300()
    for path, value in change.items():
        spoil(data, path, value)
    assert sentence in unequal_of(data, TARGET, COMPANIONS)


def test_a_right_host_has_nothing_to_say():
    assert unequal_of(b300(), TARGET, COMPANIONS) == []


def test_a_companion_that_is_not_installed_is_not_missed():
    data = b300()
    data["packages"]["nvidia-fabricmanager"] = None
    assert unequal_of(data, TARGET, COMPANIONS) == []


@pytest.mark.parametrize(
    ("parameters", "activation", "verdict"),
    [
        ({}, "reload", "ok"),
        ({"CoherentGPUMemoryMode": "driver"}, "reload", "ok"),  # loaded that way already
        ({"DeviceFileMode": "256"}, "reload", "reload"),
        ({"DeviceFileMode": "256"}, "reboot", "reboot"),
        ({"CoherentGPUMemoryMode": "numa"}, "reload", "reboot"),  # read at boot only
        ({"NewInAFutureBranch": "1"}, "reload", "ok"),  # the loaded module reports no such name
    ],
)
def test_the_plan_announces_a_parameter_before_its_file_is_written(parameters, activation, verdict):
    data = b300()
    data["driver"]["params"] = {"CoherentGPUMemoryMode": "driver", "DeviceFileMode": "438"}
    data["driver"]["params_wanted"] = {}
    wanted = {"version": TARGET, "activation": activation, "parameters": parameters}
    assert driver_verdict(Snapshot.from_json(data), wanted).name == verdict
