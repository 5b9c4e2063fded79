"""RDMA on a real kernel: software RoCE between two machines, and what peermem does to the modules below it."""

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from lab.commands import await_condition

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = "/etc/ucx/ucx.conf"
AUDIT = ["ansible-playbook", "playbooks/audit.yml", "-i", "molecule/kernel/inventory/hosts.yml", "--limit", "kernel-b"]


def wait_for(met, expected):
    await_condition(
        lambda: None if met() else "not yet", where="kernel lab", expected=expected, timeout_s=60, next_step=""
    )


def port(machine):
    lines = machine.check_output("ibv_devinfo --ib-dev=rxe0 --ib-port=1").splitlines()
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_the_verbs_see_an_active_port(host):
    seen = port(host)
    assert seen["state"].startswith("PORT_ACTIVE")
    assert seen["link_layer"] == "Ethernet"


def test_network_cards_modules_are_loaded(host):
    assert all(host.file(f"/sys/module/{module}").is_directory for module in ("mlx5_core", "mlx5_ib", "ib_umad"))


def test_peermem_holds_the_rdma_stack_until_it_is_unloaded(machine_a):
    """So it goes first where the stack is restarted or the driver replaced (Mellanox/doca-driver-build#481)."""
    machine_a.check_output("modprobe nvidia_peermem")
    assert {"nvidia_peermem"} <= set(machine_a.check_output("ls /sys/module/ib_core/holders").split())
    assert "nvidia_peermem" in machine_a.check_output("ls /sys/module/nvidia/holders").split()
    machine_a.check_output("modprobe --remove nvidia_peermem")
    assert "nvidia_peermem" not in machine_a.check_output("ls /sys/module/ib_core/holders").split()


@contextmanager
def ucx_server(machine, *options):
    """Wait for one client of ucx_perftest; systemd keeps the server and its output."""
    machine.run("systemctl reset-failed ucx-server")
    machine.check_output(f"systemd-run --unit=ucx-server ucx_perftest {' '.join(options)}")
    try:
        wait_for(lambda: machine.check_output("ss -Hltn sport = :13337"), "ucx_perftest to listen")
        yield
    finally:
        machine.run("systemctl stop ucx-server")


def test_ucx_takes_the_settings_the_role_wrote(host):
    """Asked of UCX itself, which reads the file; a misspelt name in it would be passed over without a word."""
    effective = host.check_output("ucx_info -c").splitlines()
    assert "UCX_NET_DEVICES=rxe0:1" in effective
    assert any(line.startswith("UCX_TLS=rc,") for line in effective)


def test_rc_carries_data_between_the_machines(machine_a, machine_b):
    """Over the port the settings name. UCP (tag_lat) sets connections up over UD, which timed out on rxe."""
    settings = dict(line.split("=", 1) for line in machine_a.file(SETTINGS).content_string.splitlines() if "=" in line)
    options = ["-d", settings["UCX_NET_DEVICES"], "-x", "rc_verbs", "-t", "put_lat"]
    with ucx_server(machine_b, *options):
        answer = machine_a.check_output(
            f"timeout 120 ucx_perftest 172.31.241.12 {' '.join(options)} -n 100 -w 10 -f -v"
        )
    fields = answer.splitlines()[-1].split(",")
    assert int(fields[0]) == 100
    assert float(fields[2]) > 0


def link(state):
    subprocess.run([sys.executable, "-m", "lab.kernel", "link", "kernel-b", state], cwd=ROOT, check=True)


def test_a_link_that_goes_down_is_noticed(machine_b):
    link("down")
    try:
        wait_for(lambda: "PORT_DOWN" in port(machine_b)["state"], "PORT_DOWN")
        audit = subprocess.run(AUDIT, cwd=ROOT, check=False, capture_output=True, text=True)
    finally:
        link("up")
    assert audit.returncode != 0, audit.stdout
    assert "rdma.all_down" in audit.stdout, audit.stdout
    wait_for(lambda: "PORT_ACTIVE" in port(machine_b)["state"], "PORT_ACTIVE")
