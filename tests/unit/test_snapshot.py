"""Snapshots are read with their types, or refused with the field's name."""

from __future__ import annotations

from typing import Any

import pytest
from judging import snapshot_data, spoil

from kimi_runbook.errors import RunbookError
from kimi_runbook.snapshot import Snapshot


def test_round_trip() -> None:
    snapshot = Snapshot.from_json(snapshot_data())
    assert Snapshot.from_json(snapshot.to_json()) == snapshot
    assert snapshot.driver.on_disk == "580.178.04"
    assert snapshot.container is not None and snapshot.container.running
    assert snapshot.network.listening[0].process == "vllm"


def test_optional_keys_may_be_missing() -> None:
    snapshot = Snapshot.from_json({"schema_version": 1, "hostname": "bare"})
    assert snapshot.container is None and snapshot.image is None
    assert snapshot.driver.loaded is None and snapshot.packages == {}


def test_absent_and_not_asked_stay_different() -> None:
    snapshot = Snapshot.from_json({"schema_version": 1, "hostname": "h", "packages": {"docker.io": None}})
    assert snapshot.packages == {"docker.io": None}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema_version", 2, "schema_version: 2; expected 1"),
        ("hostname", None, "hostname: nothing; expected a string"),
        ("driver|on_disk", 580.17, r"driver: on_disk: 580.17; expected a string \(quote it\)"),
        ("packages|docker.io", "20.10", "packages: docker.io: '20.10'; expected a mapping"),
        ("runtime|free_bytes", "many", "free_bytes: 'many'; expected an integer"),
        ("runtime|free_inodes", True, "free_inodes: True; expected an integer"),
        ("gpus", {}, "gpus: a mapping; expected a list"),
        ("modules|mlx5_core|loaded", 1, "loaded: 1; expected true or false"),
    ],
)
def test_wrong_shapes_are_refused(path: str, value: Any, message: str) -> None:
    data = snapshot_data()
    spoil(data, path, value)
    with pytest.raises(RunbookError, match=message):
        Snapshot.from_json(data, "k3-a.json")
