"""Interconnect settings: minimal per profile, one carrier per name, written so that NCCL reads them back."""

from __future__ import annotations

from typing import Any

import pytest

from kimi_runbook.errors import RunbookError
from kimi_runbook.interconnect import (
    Carrier,
    Setting,
    environment,
    lint,
    profiles,
    render_nccl_conf,
    render_ucx_conf,
    settings,
)

RAILS = ("mlx5_0:1", "mlx5_1:1")
HCAS = {"rdma-ib": RAILS, "rdma-roce": RAILS}


def nccl(name: str, value: str, carrier: Carrier = "nccl_conf") -> Setting:
    return Setting(name=name, value=value, carrier=carrier)


@pytest.mark.parametrize(
    ("profile", "nccl_names", "ucx"),
    [
        ("nvlink", {"NCCL_SOCKET_IFNAME"}, {}),
        (
            "mnnvl",
            {"NCCL_MNNVL_ENABLE", "NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE", "NCCL_SOCKET_IFNAME"},
            {},
        ),
        (
            "rdma-ib",
            {"NCCL_NET", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME"},
            {"UCX_TLS": "rc,cuda_copy", "UCX_NET_DEVICES": "mlx5_0:1,mlx5_1:1"},
        ),
        (
            "rdma-roce",
            {"NCCL_NET", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME"},
            {"UCX_TLS": "rc,cuda_copy", "UCX_NET_DEVICES": "mlx5_0:1,mlx5_1:1"},
        ),
        (
            "ethernet",
            {"NCCL_IB_DISABLE", "NCCL_NET", "NCCL_SOCKET_IFNAME"},
            {"UCX_TLS": "tcp,cuda_copy,sm", "UCX_NET_DEVICES": "eth0"},
        ),
    ],
)
def test_profiles(profile: str, nccl_names: set[str], ucx: dict[str, str]) -> None:
    found = settings(profile, interface="eth0", hcas=HCAS.get(profile, ()))
    values = {setting.name: setting.value for setting in found}
    assert {setting.name for setting in found if setting.carrier == "nccl_conf"} == nccl_names
    assert {setting.name: setting.value for setting in found if setting.carrier == "ucx_conf"} == ucx
    assert environment(found) == {"GLOO_SOCKET_IFNAME": "eth0"}  # Gloo wants the exact name
    assert values["NCCL_SOCKET_IFNAME"] == "=eth0"  # NCCL would match a prefix
    assert values.get("NCCL_IB_HCA", "=mlx5_0:1,mlx5_1:1") == "=mlx5_0:1,mlx5_1:1"
    assert [problem for problem in lint(found) if problem.severity == "stop"] == []


def test_every_profile_is_tested() -> None:
    assert set(profiles()) == {"mnnvl", "nvlink", "rdma-ib", "rdma-roce", "ethernet"}


def test_mnnvl_takes_ports_out_of_the_rack() -> None:
    found = {s.name: s.value for s in settings("mnnvl", interface="eno1", hcas=["mlx5_0:1"])}
    assert found["NCCL_IB_HCA"] == "=mlx5_0:1" and found["UCX_NET_DEVICES"] == "mlx5_0:1"


def test_site_values_are_added_replaced_and_taken_out() -> None:
    found = settings(
        "ethernet",
        interface="eth0",
        variables={"NCCL_IB_TIMEOUT": "22", "UCX_TLS": None, "NCCL_NET": "Socket", "OMP_NUM_THREADS": "2"},
    )
    carriers = {setting.name: setting.carrier for setting in found}
    assert carriers["NCCL_IB_TIMEOUT"] == "nccl_conf"
    assert carriers["OMP_NUM_THREADS"] == "environment"
    assert "UCX_TLS" not in carriers


@pytest.mark.parametrize(
    ("profile", "interface", "hcas", "message"),
    [
        ("infiniband", "eth0", (), "'infiniband'; expected mnnvl, nvlink, rdma-ib, rdma-roce, ethernet"),
        ("ethernet", "=eth0", (), "one exact interface name"),
        ("ethernet", "eth0,eth1", (), "one exact interface name"),
        ("ethernet", "a-name-too-long-for-linux", (), "one exact interface name"),
        ("ethernet", "", (), "one exact interface name"),
        ("ethernet", "eth0", RAILS, "profile ethernet uses none"),
        ("rdma-ib", "eth0", (), "none; expected the ports of the compute rails"),
        ("rdma-ib", "eth0", ("mlx5_0",), "expected device:port"),
        ("rdma-ib", "eth0", ("=mlx5_0:1",), "expected device:port"),
    ],
)
def test_requests_that_cannot_be_met(profile: str, interface: str, hcas: tuple[str, ...], message: str) -> None:
    with pytest.raises(RunbookError, match=message):
        settings(profile, interface=interface, hcas=hcas)


@pytest.mark.parametrize("profile", ["mnnvl", "nvlink", "rdma-ib", "rdma-roce", "ethernet"])
def test_nccl_reads_back_what_was_written(profile: str) -> None:
    """NCCL takes every line with a ``=`` that does not begin with ``#``, split at the first one (src/misc/param.cc)."""
    found = settings(profile, interface="eth0", hcas=HCAS.get(profile, ()))
    lines = [line for line in render_nccl_conf(found).splitlines() if not line.startswith("#")]
    assert lines == [f"{setting.name}={setting.value}" for setting in found if setting.carrier == "nccl_conf"]


def test_files_hold_their_own_names_only() -> None:
    found = settings("ethernet", interface="eth0")
    assert "UCX_" not in render_nccl_conf(found) and "GLOO_" not in render_nccl_conf(found)
    assert "NCCL_" not in render_ucx_conf(found).replace("# UCX", "")
    assert "UCX_TLS=tcp,cuda_copy,sm\n" in render_ucx_conf(found)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("NCCL_ALGO", "a\nNCCL_NET=IB", "one line"),
        ("NCCL_ALGO", "a\r", "one line"),
        ("NCCL_ALGO", " a", "outer spaces and quotes"),
        ("NCCL_ALGO", "a ", "outer spaces and quotes"),
        ("NCCL_ALGO", '"a"', "outer spaces and quotes"),
        ("NCCL_ALGO", "a" * 1024, "at most 1023 bytes"),
        ("NCCL_ALGO", "é" * 600, "at most 1023 bytes"),
        ("#NCCL_ALGO", "a", "a name of capitals"),
        ("NCCL_A=B", "a", "a name of capitals"),
    ],
)
def test_what_nccl_would_read_differently_is_not_written(name: str, value: str, message: str) -> None:
    with pytest.raises(RunbookError, match=message):
        render_nccl_conf([nccl(name, value)])


def test_longest_value_is_written() -> None:
    assert f"NCCL_ALGO={'a' * 1023}\n" in render_nccl_conf([nccl("NCCL_ALGO", "a" * 1023)])


@pytest.mark.parametrize("value", ["rc;ud", "rc #ud"])
def test_ucx_values_hold_no_comment(value: str) -> None:
    with pytest.raises(RunbookError, match="start a comment"):
        render_ucx_conf([nccl("UCX_TLS", value, "ucx_conf")])


@pytest.mark.parametrize(
    ("values", "options", "code"),
    [
        pytest.param({"NCCL_MNNVL_ENABLE": "1", "NCCL_CUMEM_ENABLE": "0"}, {}, "needs_cumem", id="mnnvl-no-cumem"),
        pytest.param({"NCCL_NVLS_ENABLE": "1", "NCCL_CUMEM_ENABLE": "0"}, {}, "needs_cumem", id="nvls-no-cumem"),
        pytest.param({"NCCL_NET": "IB", "NCCL_IB_DISABLE": "1"}, {}, "ib_disabled", id="ib-disabled"),
        pytest.param({"NCCL_DMABUF_ENABLE": "0"}, {}, "no_gpudirect", id="dmabuf-off"),
        pytest.param({"NCCL_DMABUF_ENABLE": "0"}, {"peermem_loaded": True}, None, id="dmabuf-off-with-peermem"),
        pytest.param({"UCX_TLS": "rc,sm"}, {}, "no_gpu_transport", id="ucx-no-gpu"),
        pytest.param({"UCX_TLS": "^ud"}, {}, None, id="ucx-exclusion"),
        pytest.param(
            {"NCCL_CROSS_NIC": "0"},
            {"all2all_backend": "deepep_v2", "dmabuf_works": True},
            "deepep_cross_nic",
            id="deepep-cross-nic",
        ),
        pytest.param({}, {"all2all_backend": "deepep_v2"}, "deepep_memory", id="deepep-nothing-proved"),
        pytest.param({}, {"all2all_backend": "deepep_v2", "dmabuf_works": True}, None, id="deepep-dmabuf"),
        pytest.param({}, {"all2all_backend": "deepep_v2", "peermem_loaded": True}, None, id="deepep-peermem"),
        pytest.param({"NCCL_IB_HCA": "=mlx5_0:1,mlx5_9:1"}, {"active_hcas": ["mlx5_0:1"]}, "hca_down", id="port-down"),
        pytest.param({"NCCL_IB_HCA": "=mlx5_0:1:0:1"}, {"active_hcas": ["mlx5_0:1"]}, None, id="rail-and-plane"),
        pytest.param({"NCCL_IB_HCA": "mlx5_1"}, {}, "hca_prefix", id="prefix"),
        pytest.param({"NCCL_IB_GID_INDEX": "3"}, {}, "fixed_gid", id="gid"),
        pytest.param({"NCCL_DEBUG": "INFO"}, {}, "debug_leftover", id="debug"),
        pytest.param({"NCCL_P2P_DISABLE": "1"}, {}, "debug_leftover", id="p2p"),
        pytest.param({"NCCL_IB_TIMEOUTS": "22"}, {}, "unknown_name", id="misspelt"),
        pytest.param({}, {"profile": "rdma-roce"}, "site_value", id="traffic-class"),
        pytest.param({"NCCL_IB_TC": "41"}, {"profile": "rdma-roce"}, None, id="traffic-class-given"),
        pytest.param({}, {"engine_environment": {"NCCL_NET": "IB"}}, "wrong_place", id="nccl-in-environment"),
    ],
)
def test_lint(values: dict[str, str], options: dict[str, Any], code: str | None) -> None:
    found = [nccl(name, value, "ucx_conf" if name.startswith("UCX") else "nccl_conf") for name, value in values.items()]
    assert [problem.code for problem in lint(found, **options)] == ([code] if code else [])


def test_lint_sees_a_name_in_two_places() -> None:
    found = [nccl("NCCL_NET", "Socket")]
    (problem,) = lint(found, engine_environment={"NCCL_NET": "Socket"})
    assert (problem.code, problem.severity) == ("two_places", "stop")
    assert "environment would win" in problem.message
    (problem,) = lint([nccl("GLOO_SOCKET_IFNAME", "eth0")])
    assert (problem.code, problem.message) == ("wrong_place", "GLOO_SOCKET_IFNAME belongs to environment")
