"""The dma-buf ladder: which rung, why, and never dma-buf off without evidence and peer memory (C53)."""

from dataclasses import replace
from typing import Any

import pytest

from kimi_runbook import dmabuf, engine_node
from kimi_runbook.dmabuf import Observed, RungTest, decide
from kimi_runbook.errors import RunbookError

ERRNO = "mlx5dv_reg_dmabuf_mr failed, errno 524"
GOOD = Observed(
    rails={"mlx5_0:1": "ACTIVE", "mlx5_1:1": "ACTIVE"},
    pairs=True,
    flavour="open",
    kernel="6.8.0-90-generic",
    libmlx5="1.25.54.0",
    libibverbs="1.14.54.0",
    override=False,
    peermem=False,
)
OLD_SOFTWARE: list[tuple[dict[str, Any], str]] = [
    ({"flavour": "proprietary"}, "the proprietary driver"),
    ({"kernel": "5.4.0-200-generic"}, "kernel 5.4.0"),
    ({"libmlx5": "1.24.44.0"}, "libmlx5 1.24.44.0 in the image"),
    ({"libibverbs": "1.11.32.0"}, "rdma-core 32"),
]


def failed(*rungs: str) -> list[RungTest]:
    return [RungTest(rung=rung, passed=False, observed=ERRNO, source="nccl.log") for rung in rungs]


def passed(rung: str) -> RungTest:
    return RungTest(rung=rung, passed=True, observed="GDRDMA", source="nccl.log")


FOUR = ("software", "topology_override", "no_data_direct")


@pytest.mark.parametrize(
    ("observed", "tests", "rung", "state", "settings"),
    [
        pytest.param(GOOD, [], "software", "untested", {}, id="as-it-comes"),
        pytest.param(GOOD, [passed("software")], "software", "passed", {}, id="proved"),
        pytest.param(
            replace(GOOD, rails={"mlx5_0:1": "DOWN"}), [passed("software")], "rails", "not_met", {}, id="rail-down"
        ),
        pytest.param(replace(GOOD, rails={"mlx5_9:1": None}), [], "rails", "not_met", {}, id="rail-absent"),
        pytest.param(replace(GOOD, pairs=False), [], "rails", "not_met", {}, id="C53-not-siblings"),
        pytest.param(GOOD, failed("software"), "topology_override", "not_met", {}, id="C53-override-first"),
        pytest.param(
            replace(GOOD, override=True), failed("software"), "topology_override", "untested", {}, id="override-loaded"
        ),
        pytest.param(
            GOOD,
            failed("software", "topology_override"),
            "no_data_direct",
            "untested",
            {"NCCL_IB_DATA_DIRECT": "0", "UCX_IB_DIRECT_NIC": "n"},
            id="without-data-direct",
        ),
        pytest.param(
            GOOD,
            [*failed("software", "topology_override"), passed("no_data_direct")],
            "no_data_direct",
            "passed",
            {"NCCL_IB_DATA_DIRECT": "0", "UCX_IB_DIRECT_NIC": "n"},
            id="without-data-direct-proved",
        ),
        pytest.param(GOOD, failed(*FOUR), "peermem", "not_met", {}, id="last-rung-needs-peermem"),
        pytest.param(
            replace(GOOD, peermem=True),
            failed(*FOUR),
            "peermem",
            "untested",
            {"NCCL_DMABUF_ENABLE": "0"},
            id="last-rung-with-peermem",
        ),
        pytest.param(replace(GOOD, peermem=True), failed(*FOUR, "peermem"), "", "failed", {}, id="nothing-left"),
        pytest.param(
            replace(GOOD, peermem=True), [passed("peermem")], "software", "untested", {}, id="no-rung-is-skipped"
        ),
        pytest.param(
            replace(GOOD, peermem=True),
            failed("software", "no_data_direct"),
            "topology_override",
            "not_met",
            {},
            id="nor-one-in-between",
        ),
        pytest.param(
            GOOD, [*failed("software"), passed("software")], "software", "passed", {}, id="the-last-test-counts"
        ),
        pytest.param(Observed(rails={}), [], "software", "untested", {}, id="nothing-told"),
    ],
)
def test_where_the_ladder_ends(
    observed: Observed, tests: list[RungTest], rung: str, state: str, settings: dict[str, str]
) -> None:
    found = decide(observed, tests)
    assert (found.rung, found.state, found.settings) == (rung, state, settings)
    assert found.reason and all(step.why for step in found.steps)


@pytest.mark.parametrize(("change", "told"), OLD_SOFTWARE)
def test_c53_what_dma_buf_needs(change: dict[str, Any], told: str) -> None:
    found = decide(replace(GOOD, **change), failed(*FOUR))
    assert (found.rung, found.state) == ("software", "not_met")
    assert told in found.reason, "an old library in the image is mended first, whatever was tested with it"


def test_the_record_says_why_each_rung_was_left() -> None:
    found = decide(replace(GOOD, peermem=True), failed(*FOUR))
    assert [(step.rung, step.state) for step in found.steps] == [
        ("rails", "met"),
        *((rung, "failed") for rung in FOUR),
        ("peermem", "untested"),
    ]
    assert found.steps[1].why == f"{ERRNO} (nccl.log)"


def test_a_test_of_no_rung_is_refused() -> None:
    with pytest.raises(RunbookError, match="rung software2"):
        decide(GOOD, failed("software2"))


@pytest.mark.parametrize(
    "row",
    [
        {"rung": "software", "passed": False, "observed": ERRNO},
        {"rung": "software", "passed": False, "observed": "", "source": "x"},
        {"rung": "software", "passed": "no", "observed": ERRNO, "source": "x"},
        {"passed": True, "observed": ERRNO, "source": "x"},
    ],
)
def test_evidence_is_complete_or_refused(row: dict[str, Any]) -> None:
    with pytest.raises(RunbookError, match=r"interconnect_dmabuf_tests, entry 1"):
        dmabuf.tests_of([row])


@pytest.mark.parametrize(
    ("line", "proved"),
    [
        pytest.param("net_ib.cc: Call to mlx5dv_reg_dmabuf_mr failed with error Unknown error 524", False, id="nccl"),
        pytest.param("NCCL WARN Call to ibv_reg_dmabuf_mr failed with error Bad address errno 14", False, id="verbs"),
        pytest.param("NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA", True, id="used"),
        pytest.param("NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0", None, id="through-the-host"),
    ],
)
def test_what_a_log_proves(line: str, proved: bool | None) -> None:
    found = dmabuf.test_of_log("software", f"NCCL INFO start\n{line}\n", "nccl.log")
    assert (found.passed if found else None) is proved


def test_a_failure_outweighs_a_channel_that_works() -> None:
    text = "via NET/IB/0/GDRDMA\nmlx5dv_reg_dmabuf_mr failed, errno 524\n"
    found = dmabuf.test_of_log("software", text, "nccl.log")
    assert found is not None and not found.passed and "524" in found.observed


SEEN: dict[str, Any] = {
    "os": {"kernel": "6.8.0-90-generic"},
    "driver": {"flavour": "open", "params": {"GrdmaPciTopoCheckOverride": "1"}},
    "rdma_devices": [{"name": "mlx5_0", "port": 1, "state": "ACTIVE"}, {"name": "mlx5_9", "port": 1, "state": "DOWN"}],
    "rdma": {"ofed": None, "peer_memory": False},
    "image": {
        "stack": {
            "libraries": [
                {"name": "libmlx5.so.1", "path": "/a", "version": "1.25.54.0"},
                {"name": "libmlx5.so.1", "path": "/b", "version": "1.9.8.0"},
                {"name": "libibverbs.so.1", "path": "/c", "version": "1.14.54.0"},
            ]
        }
    },
}


def test_what_a_snapshot_tells() -> None:
    found = dmabuf.observe(SEEN, ["mlx5_0:1", "mlx5_3:1"])
    assert found.rails == {"mlx5_0:1": "ACTIVE", "mlx5_3:1": None}
    assert (found.flavour, found.kernel, found.override, found.peermem) == ("open", "6.8.0-90-generic", True, False)
    assert (found.libmlx5, found.libibverbs) == ("1.9.8.0", "1.14.54.0"), "the oldest copy is the one that fails"


@pytest.mark.parametrize(
    ("ofed", "asked", "counts"), [("OFED-25", True, True), ("OFED-25", False, False), (None, True, False)]
)
def test_peermem_counts_where_a_role_loads_it_and_it_can_exist(ofed: str | None, asked: bool, counts: bool) -> None:
    seen = {**SEEN, "rdma": {"ofed": ofed, "peer_memory": False}}
    assert dmabuf.observe(seen, [], peermem_asked=asked).peermem is counts


# The settings.

OFF = {"NCCL_DMABUF_ENABLE": "0"}


def written(ladder: Any, variables: Any = None) -> str:
    return str(engine_node.node_settings("rdma-ib", "eth0", ["mlx5_0:1"], variables, ladder)["nccl_conf"])


def test_the_ladder_sets_what_its_rung_needs_and_a_site_may_say_otherwise() -> None:
    ladder = decide(GOOD, failed("software", "topology_override")).to_json()
    assert "NCCL_IB_DATA_DIRECT=0\n" in written(ladder)
    assert "NCCL_IB_DATA_DIRECT=2\n" in written(ladder, {"NCCL_IB_DATA_DIRECT": "2"})
    assert written(decide(GOOD).to_json()) == written(None), "dma-buf as it comes sets nothing"


def test_dma_buf_is_switched_off_on_the_last_rung() -> None:
    assert "NCCL_DMABUF_ENABLE=0\n" in written(decide(replace(GOOD, peermem=True), failed(*FOUR)).to_json())


@pytest.mark.parametrize(
    "ladder",
    [
        pytest.param(decide(GOOD).to_json(), id="untested"),
        pytest.param(decide(GOOD, failed(*FOUR)).to_json(), id="no-peermem"),
        pytest.param(decide(replace(GOOD, peermem=True), failed("software")).to_json(), id="rungs-left"),
        pytest.param(None, id="no-ladder"),
    ],
)
def test_dma_buf_off_by_hand_is_refused(ladder: Any) -> None:
    with pytest.raises(RunbookError, match="NCCL_DMABUF_ENABLE=0; the dma-buf ladder ends at"):
        written(ladder, OFF)
