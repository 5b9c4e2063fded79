"""Filters that carry values from inventory and snapshots into the library and back; the logic is the library's.

Every task of every host starts a process that loads this file, so what only one task needs is imported there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError

from kimi_runbook import engine_node, wishes
from kimi_runbook.errors import RunbookError
from kimi_runbook.transaction.drain import needs_drain


def _told(function):
    """Turn the library's error into Ansible's, word for word."""

    def wrapper(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except RunbookError as error:
            raise AnsibleFilterError(str(error)) from error

    return wrapper


def _installed(packages: dict[str, Any]) -> list[str]:
    return [name for name, package in packages.items() if package]


def _driver_verdict(snapshot: dict[str, Any], wanted: dict[str, Any]) -> dict[str, str]:
    """Return ``name`` and ``reason`` of the verdict on the driver as it is now."""
    from kimi_runbook.driver_verdict import driver_verdict  # noqa: PLC0415 - see the module's docstring
    from kimi_runbook.snapshot import Snapshot  # noqa: PLC0415 - see the module's docstring

    return driver_verdict(Snapshot.from_json(snapshot), wanted).to_json()


def _fabric_module():
    from kimi_runbook import fabric  # noqa: PLC0415 - see the module's docstring

    return fabric


def _fabric(snapshot: dict[str, Any], lock: dict[str, Any], imex: dict[str, Any]) -> dict[str, Any]:
    """Return what this host gets of its NVLink fabric."""
    return _fabric_module().host_wish(snapshot, lock, imex)


def _domain_nodes(hosts: list[str], hostvars: dict[str, Any], domain: str) -> list[str]:
    """Return the addresses of an NVLink domain's hosts."""
    return _fabric_module().domain_nodes(hosts, hostvars, domain)


def _rdma_module():
    from kimi_runbook import rdma  # noqa: PLC0415 - see the module's docstring

    return rdma


def _dmabuf(snapshot: dict[str, Any], rails: list[str], tests: list[dict[str, Any]], peermem_asked: bool) -> Any:
    """Return where the dma-buf ladder ends on this host."""
    from kimi_runbook import dmabuf  # noqa: PLC0415 - see the module's docstring

    observed = dmabuf.observe(snapshot, rails, peermem_asked=peermem_asked)
    return dmabuf.decide(observed, dmabuf.tests_of(tests)).to_json()


def _pending_run(runs_dir: str, run_id: str = "") -> str:
    """Return the folder of the run whose observation is pending."""
    from kimi_runbook.acceptance.completion import pending_run  # noqa: PLC0415 - see the module's docstring

    return str(pending_run(Path(runs_dir), run_id))


def _weights_list(path: str) -> dict[str, Any]:
    """Return ``files``, ``revision`` and ``proved`` (the digest of names and sums) of a list; empty without one."""
    from kimi_runbook.weights import read_manifest  # noqa: PLC0415 - see the module's docstring

    if not path:
        return {}
    manifest = read_manifest(Path(path))
    return {**manifest.to_json(), "proved": manifest.digest()}


def _acceptance_hosts(nodes: list[str], hostvars: dict[str, Any], *, sudo: bool) -> list[dict[str, Any]]:
    """Return the nodes in rank order with their testinfra connection, made of what Ansible itself connects with.

    Built here and not read from the inventory by testinfra, which would leave templated values as they stand.
    """
    return [
        {
            "name": node,
            "address": hostvars[node]["engine_address"],
            "rank": rank,
            **_connection(node, hostvars[node], sudo=sudo),
        }
        for rank, node in enumerate(nodes)
    ]


def _connection(node: str, variables: dict[str, Any], *, sudo: bool) -> dict[str, Any]:
    user = f"{variables['ansible_user']}@" if variables.get("ansible_user") else ""
    port = f":{variables['ansible_port']}" if variables.get("ansible_port") else ""
    extra = (variables.get("ansible_ssh_common_args"), variables.get("ansible_ssh_extra_args"))
    options = {
        "ssh_extra_args": " ".join(str(part) for part in extra if part),
        "ssh_identity_file": str(variables.get("ansible_ssh_private_key_file") or ""),
    }
    return {
        "uri": f"ssh://{user}{variables.get('ansible_host') or node}{port}" + ("?sudo=true" if sudo else ""),
        "options": {name: value for name, value in options.items() if value},
    }


class FilterModule:
    """The filters, all named kimi_*."""

    def filters(self):
        """Return name to function."""
        return {
            "kimi_acceptance_hosts": _acceptance_hosts,
            "kimi_apt_names": wishes.apt_names,
            "kimi_apt_source": _told(wishes.apt_source),
            "kimi_dmabuf": _told(_dmabuf),
            "kimi_dnf_names": wishes.dnf_names,
            "kimi_domain_nodes": _told(_domain_nodes),
            "kimi_driver_verdict": _told(_driver_verdict),
            "kimi_engine_drift": lambda snapshot, launch, files: engine_node.drift(
                snapshot["engine"]["container"], launch, files
            ),
            "kimi_engine_node": _told(engine_node.node_wish),
            "kimi_expected": wishes.assemble,
            "kimi_image_held": engine_node.held_reference,
            "kimi_fabric": _told(_fabric),
            "kimi_fabric_tools": lambda _: _fabric_module().asked_packages(),
            "kimi_installed": _installed,
            "kimi_interconnect": _told(engine_node.node_settings),
            "kimi_interconnect_files": engine_node.settings_files,
            "kimi_needs_drain": needs_drain,
            "kimi_pending_run": _told(_pending_run),
            "kimi_packages": wishes.packages,
            "kimi_proof_argv": engine_node.proof_argv,
            "kimi_rdma_asked": lambda modules: _rdma_module().asked_modules(modules),
            "kimi_rdma_modules": _told(lambda *args: _rdma_module().host_modules(*args)),
            "kimi_units": wishes.units,
            "kimi_weights_list": _told(_weights_list),
        }
