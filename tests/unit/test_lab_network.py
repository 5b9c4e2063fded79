import json
from ipaddress import IPv4Network

import pytest

from lab.network import Taken, conflict, create_arguments, foreign, parse_networks, parse_routes

# /proc/net/route of the measuring machine, 2026-11-30, with the lab's bridge added.
ROUTES = """\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
kimi-lab\t00F01FAC\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
"""


def test_parse_routes_leaves_the_default_route_out() -> None:
    assert parse_routes(ROUTES) == [
        Taken(IPv4Network("192.0.2.0/24"), "route by eth0"),
        Taken(IPv4Network("172.31.240.0/24"), "route by kimi-lab"),
    ]


def test_parse_networks_tells_the_labs_own_network() -> None:
    text = json.dumps(
        [
            {
                "Name": "bridge",
                "Labels": {},
                "IPAM": {"Config": [{"Subnet": "172.17.0.0/16"}, {"Subnet": "fd00::/64"}]},
            },
            {"Name": "host", "Labels": None, "IPAM": {"Config": None}},
            {"Name": "x", "Labels": {"kimi-runbook.lab": "1"}, "IPAM": {"Config": [{"Subnet": "172.31.240.0/24"}]}},
        ]
    )
    assert parse_networks(text) == [
        (Taken(IPv4Network("172.17.0.0/16"), "Docker network bridge"), False),
        (Taken(IPv4Network("172.31.240.0/24"), "Docker network x"), True),
    ]


@pytest.mark.parametrize(
    ("subnet", "overlaps"),
    [("172.31.240.0/24", True), ("172.16.0.0/12", True), ("172.31.240.128/25", True), ("172.31.241.0/24", False)],
)
def test_conflict(subnet: str, overlaps: bool) -> None:
    taken = Taken(IPv4Network(subnet), "route by tun0")
    assert conflict([taken]) == (taken if overlaps else None)


def test_a_route_by_the_labs_bridge_is_its_own_only_with_its_network() -> None:
    routes = [Taken(IPv4Network("172.31.240.0/24"), "route by kimi-lab")]
    network = Taken(IPv4Network("172.31.240.0/24"), "Docker network kimi-lab")
    assert foreign(routes, [(network, True)]) == []
    assert foreign(routes, []) == routes
    assert foreign([], [(network, False)]) == [network]


def test_create_arguments_carry_the_label() -> None:
    arguments = create_arguments()
    assert arguments[arguments.index("--label") + 1] == "kimi-runbook.lab=1"
    assert arguments[-1] == "kimi-lab"
