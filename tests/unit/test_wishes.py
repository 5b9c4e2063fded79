"""What the roles want, added up for the judge."""

import hashlib

import pytest

from kimi_runbook import wishes
from kimi_runbook.errors import RunbookError

REPOSITORY = {"name": "cuda", "uris": ["http://mirror.example/cuda"], "suites": ["stable"], "components": ["main"]}


def test_apt_source_writes_key_and_entry(tmp_path):
    key = tmp_path / "key.asc"
    key.write_text("-----BEGIN PGP PUBLIC KEY BLOCK-----\n", encoding="utf-8")
    files = wishes.apt_source({**REPOSITORY, "key_file": str(key)}, "/usr/share/keyrings/cuda.asc")
    assert files[0] == {"path": "/usr/share/keyrings/cuda.asc", "mode": "0644", "content": key.read_text()}
    assert files[1]["path"] == "/etc/apt/sources.list.d/cuda.sources"
    assert "Suites: stable\nComponents: main\nSigned-By: /usr/share/keyrings/cuda.asc\n" in files[1]["content"]


def test_a_flat_repository_has_no_components(tmp_path):
    key = tmp_path / "key.asc"
    key.write_text("key", encoding="utf-8")
    flat = {**REPOSITORY, "suites": ["/"], "components": [], "key_file": str(key)}
    assert "Components" not in wishes.apt_source(flat, "/k.asc")[1]["content"]


@pytest.mark.parametrize("key_file", ["", "/does/not/exist.asc"])
def test_a_missing_key_stops_with_the_next_step(key_file):
    with pytest.raises(RunbookError, match=r"package source cuda: no signing key .* gpg"):
        wishes.apt_source({**REPOSITORY, "key_file": key_file}, "/k.asc")


def test_apt_names_pin_where_a_version_is_wished_for():
    assert wishes.apt_names(wishes.packages(["a"], "1-1") + wishes.packages(["b"])) == ["a=1-1", "b"]


def test_assemble_leaves_out_what_no_file_may_hold():
    engine = {"container": "kimi-engine", "env": {"NCCL_NET": "IB", "HF_TOKEN": "s3cret", "http_proxy": "http://u:p@x"}}
    expected = wishes.assemble({"engine": {"engine": engine}}, "k3-a", "192.0.2.1", [])
    assert expected["engine"] == {"container": "kimi-engine", "env": {"NCCL_NET": "IB"}}
    assert "HF_TOKEN" in engine["env"]


def test_assemble_says_what_nccl_and_ucx_files_set_and_no_other_file():
    content = "# Written here.\nNCCL_NET=IB\nNCCL_IB_HCA==mlx5_0:1\nNCCL_AUTH_TOKEN=s3cret\n\n"
    files = [{"path": path, "mode": "0644", "content": content} for path in ("/etc/nccl.conf", "/etc/x.conf")]
    nccl, other = wishes.assemble({"interconnect": {"files": files}}, "k3-a", "192.0.2.1", [])["files"]
    assert nccl["settings"] == {"NCCL_IB_HCA": "=mlx5_0:1", "NCCL_NET": "IB"}
    assert "settings" not in other and nccl["sha256"] == other["sha256"]


def test_assemble_names_the_role_of_every_wish():
    parts = {
        "rdma": {
            "files": [{"path": "/etc/x", "mode": "0644", "content": "x\n"}],
            "packages": wishes.packages(["rdma-core"]),
            "modules": ["ib_umad"],
        },
        "gpu_driver": {
            "units": wishes.units(["p.service"]),
            "driver": {"version": "580.178.04", "activation": "reboot"},
        },
        "container_runtime": {"daemon": {"mtu": 9000}},
        "engine": {},
    }
    expected = wishes.assemble(parts, "k3-a", "192.0.2.1", [{"id": "debian", "versions": ["12"]}])
    assert expected["files"] == [
        {"role": "rdma", "path": "/etc/x", "mode": "0644", "sha256": hashlib.sha256(b"x\n").hexdigest()}
    ]
    assert expected["modules"] == [{"role": "rdma", "name": "ib_umad"}]
    assert expected["units"] == [{"role": "gpu_driver", "name": "p.service", "enabled": True, "active": True}]
    assert expected["daemon"] == {"role": "container_runtime", "settings": {"mtu": 9000}}
    assert expected["driver"]["version"] == "580.178.04"
    assert "image" not in expected


def test_a_package_that_two_roles_wish_is_the_first_ones():
    """Fabric manager changes with the driver where it is there; the role of the fabric brings it where it is not."""
    parts = {
        "gpu_driver": {"packages": wishes.packages(["nvidia-fabricmanager"], "580.178.04-1", held=True)},
        "fabric_services": {
            "packages": wishes.packages(["nvidia-fabricmanager"], "580.178.04-1", held=True)
            + wishes.packages(["nvlsm"])
        },
    }
    packages = wishes.assemble(parts, "k3-a", "192.0.2.1", [])["packages"]
    assert [(package["role"], package["name"]) for package in packages] == [
        ("gpu_driver", "nvidia-fabricmanager"),
        ("fabric_services", "nvlsm"),
    ]
