"""NCCL, UCX and Gloo settings: one function yields name, value and carrier; files are written and linted from that."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, cast

from kimi_runbook.errors import RunbookError
from kimi_runbook.reading import Fields, data_file

Carrier = Literal["nccl_conf", "ucx_conf", "environment"]

_NAME = re.compile(r"[A-Z][A-Z0-9_]*")
_NCCL_VALUE_LIMIT = 1023  # characters kept of a value; NVIDIA/nccl src/misc/param.cc, setEnvFile
_INTERFACE_LIMIT = 15  # IFNAMSIZ - 1 of the Linux kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One variable, its value, and the one place it is set in."""

    name: str
    value: str
    carrier: Carrier


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something wrong with a set of settings; severity stop or warn."""

    code: str
    severity: str
    message: str


def profiles() -> tuple[str, ...]:
    """Return the names of the interconnect profiles."""
    return data_file("interconnect.yml").fields("profiles").names()


@cache
def debug_variables() -> frozenset[str]:
    """Return the variables that belong to a search for a fault and never to a service."""
    return frozenset(data_file("interconnect.yml").texts("debug_variables"))


def settings(
    profile: str, *, interface: str, hcas: Sequence[str] = (), variables: Mapping[str, str | None] | None = None
) -> tuple[Setting, ...]:
    """Return the settings of one host.

    Args:
        profile: mnnvl, nvlink, rdma-ib, rdma-roce or ethernet.
        interface: Network interface for bootstrap and Gloo, its exact name.
        hcas: RDMA ports of the compute rails, e.g. ``mlx5_0:1``.
        variables: Site values on top; None takes a profile's variable out.

    Raises:
        RunbookError: unknown profile, no usable interface name, or ports where the profile has none (or the reverse).
    """
    known = data_file("interconnect.yml").fields("profiles")
    if profile not in known.names():
        raise RunbookError(
            where="interconnect profile",
            observed=repr(profile),
            expected=", ".join(known.names()),
            next_step="Correct interconnect_profile in the inventory.",
        )
    facts = known.fields(profile)
    _check_names(profile, facts, interface, hcas)
    values: dict[str, str | None] = dict(facts.text_map("settings"))
    if hcas:
        values |= facts.text_map("with_hcas")
    filled = {
        name: value and value.replace("{interface}", interface).replace("{hcas}", ",".join(hcas))
        for name, value in values.items()
    }
    filled |= dict(variables or {})
    return tuple(
        Setting(name=name, value=value, carrier=carrier_of(name)) for name, value in filled.items() if value is not None
    )


def carrier_of(name: str) -> Carrier:
    """Return where a variable is set: NCCL's in nccl.conf, UCX's in ucx.conf, others in the environment."""
    for prefix, carrier in data_file("interconnect.yml").text_map("carriers").items():
        if name.startswith(prefix):
            return cast(Carrier, carrier)
    return "environment"


def environment(found: Iterable[Setting]) -> dict[str, str]:
    """Return the settings that go to the engine's environment."""
    return {setting.name: setting.value for setting in found if setting.carrier == "environment"}


def render_nccl_conf(found: Iterable[Setting]) -> str:
    """Return nccl.conf.

    NCCL splits a line at its first ``=`` and takes the rest as it is: no quotes, no trimming, no comments behind a
    value, 1023 characters at most (src/misc/param.cc).

    Raises:
        RunbookError: a value or name that this grammar would read back differently.
    """
    lines = ["# NCCL settings of this host. Written by the interconnect role; changes made here are lost."]
    for setting in found:
        if setting.carrier != "nccl_conf":
            continue
        _check_line("nccl.conf", setting)
        if len(setting.value.encode()) > _NCCL_VALUE_LIMIT:
            raise _unwritable("nccl.conf", setting, f"a value of at most {_NCCL_VALUE_LIMIT} bytes")
        lines.append(f"{setting.name}={setting.value}")
    return "\n".join(lines) + "\n"


def render_ucx_conf(found: Iterable[Setting]) -> str:
    """Return ucx.conf, an INI file without sections; RunbookError when a value could be read as a comment."""
    lines = ["# UCX settings of this host. Written by the interconnect role; changes made here are lost."]
    for setting in found:
        if setting.carrier != "ucx_conf":
            continue
        _check_line("ucx.conf", setting)
        if ";" in setting.value or "#" in setting.value:
            raise _unwritable("ucx.conf", setting, "a value without ; and #, which start a comment")
        lines.append(f"{setting.name}={setting.value}")
    return "\n".join(lines) + "\n"


def lint(  # noqa: PLR0913 - what is known of the host, each part optional
    found: Iterable[Setting],
    *,
    engine_environment: Mapping[str, str] | None = None,
    profile: str | None = None,
    peermem_loaded: bool | None = None,
    dmabuf_works: bool | None = None,
    all2all_backend: str | None = None,
    active_hcas: Sequence[str] | None = None,
) -> tuple[Problem, ...]:
    """Return contradictions, leftovers and unknown names; empty when all is well.

    Args:
        found: The settings of one host.
        engine_environment: What else is in the engine's environment.
        profile: The profile they were made for, to know which site values are due.
        peermem_loaded: Whether nvidia_peermem is loaded; None when unknown.
        dmabuf_works: Whether dma-buf registration was proved; None when unknown.
        all2all_backend: The engine's all-to-all backend, e.g. ``deepep_v2``.
        active_hcas: RDMA ports that are up, as ``mlx5_0:1``; None when unknown.
    """
    found, problems = tuple(found), _Problems()
    files = {setting.name: setting.value for setting in found if setting.carrier != "environment"}
    env = {**(engine_environment or {}), **environment(found)}
    _lint_places(found, files, env, problems)
    values = {**files, **env}
    _lint_nccl(values, problems, peermem_loaded, active_hcas)
    if "UCX_TLS" in values:
        _lint_ucx_tls(values["UCX_TLS"], problems)
    if all2all_backend == "deepep_v2":
        _lint_deepep(values, problems, peermem_loaded, dmabuf_works)
    if profile is not None:
        due = data_file("interconnect.yml").fields("profiles").fields(profile).texts("site_settings")
        for name in due:
            if name not in values:
                problems.warn("site_value", f"{name} is not set; it has to match the site's switches")
    return tuple(problems.found)


class _Problems:
    def __init__(self) -> None:
        self.found: list[Problem] = []

    def stop(self, code: str, message: str) -> None:
        self.found.append(Problem(code=code, severity="stop", message=message))

    def warn(self, code: str, message: str) -> None:
        self.found.append(Problem(code=code, severity="warn", message=message))


def _lint_places(
    found: Sequence[Setting], files: Mapping[str, str], env: Mapping[str, str], problems: _Problems
) -> None:
    known = data_file("interconnect.yml").texts("known_variables")
    for name in sorted(set(files) & set(env)):
        problems.stop("two_places", f"{name} is set in a file and in the environment; the environment would win")
    for setting in found:
        if setting.carrier != carrier_of(setting.name):
            problems.stop("wrong_place", f"{setting.name} belongs to {carrier_of(setting.name)}")
    for name in sorted(set(env) - set(files)):
        if carrier_of(name) != "environment" and name != "NCCL_CONF_FILE":
            problems.stop("wrong_place", f"{name} is in the environment; it belongs to {carrier_of(name)}")
    for name in sorted({*files, *env}):
        if name in debug_variables():
            problems.stop("debug_leftover", f"{name} is for debugging and must not stay in a service")
        elif carrier_of(name) != "environment" and name not in known:
            problems.warn("unknown_name", f"{name} is unknown here, and a misspelt name is accepted silently")


def _lint_nccl(
    values: Mapping[str, str], problems: _Problems, peermem_loaded: bool | None, active_hcas: Sequence[str] | None
) -> None:
    for name in ("NCCL_MNNVL_ENABLE", "NCCL_NVLS_ENABLE"):
        if values.get(name) == "1" and values.get("NCCL_CUMEM_ENABLE") == "0":
            problems.stop("needs_cumem", f"{name}=1 needs cuMem, and NCCL_CUMEM_ENABLE=0 switches it off")
    if values.get("NCCL_NET") == "IB" and values.get("NCCL_IB_DISABLE") == "1":
        problems.stop("ib_disabled", "NCCL_NET=IB asks for what NCCL_IB_DISABLE=1 switches off")
    if values.get("NCCL_DMABUF_ENABLE") == "0" and not peermem_loaded:
        problems.stop(
            "no_gpudirect", "NCCL_DMABUF_ENABLE=0 needs nvidia_peermem loaded, or traffic goes through host memory"
        )
    if "NCCL_IB_GID_INDEX" in values:
        problems.warn("fixed_gid", "NCCL_IB_GID_INDEX is fixed; since NCCL 2.21 the index is chosen at run time")
    hcas = values.get("NCCL_IB_HCA", "")
    if hcas and not hcas.startswith(("=", "^=")):
        problems.warn("hca_prefix", f"NCCL_IB_HCA={hcas} matches by prefix: mlx5_1 takes in mlx5_10; begin it with =")
    if active_hcas is not None and hcas.startswith("="):
        for hca in hcas[1:].split(","):
            if not names_port(hca, active_hcas):
                problems.stop("hca_down", f"NCCL_IB_HCA names {hca}, which is absent or down")


def names_port(hca: str, ports: Sequence[str]) -> bool:
    """Whether an exact entry of NCCL_IB_HCA (``device[:port[:rail[:plane]]]``) names one of ``device:port``.

    Without a port, or with an empty one, it names all of its device (NCCL user guide, NCCL_IB_HCA).
    """
    device, _, rest = hca.partition(":")
    port = rest.partition(":")[0]
    return any(one == f"{device}:{port}" or (not port and one.partition(":")[0] == device) for one in ports)


def _lint_ucx_tls(value: str, problems: _Problems) -> None:
    transports = set(value.split(","))
    if not value.startswith("^") and not transports & set(data_file("interconnect.yml").texts("ucx_gpu_transports")):
        problems.stop("no_gpu_transport", f"UCX_TLS={value} has no transport for GPU memory, such as cuda_copy")


def _lint_deepep(
    values: Mapping[str, str], problems: _Problems, peermem_loaded: bool | None, dmabuf_works: bool | None
) -> None:
    if values.get("NCCL_CROSS_NIC") == "0":
        problems.stop("deepep_cross_nic", "deepep_v2 does not work with NCCL_CROSS_NIC=0")
    if not peermem_loaded and (values.get("NCCL_DMABUF_ENABLE") == "0" or not dmabuf_works):
        problems.stop("deepep_memory", "deepep_v2 needs dma-buf proved to work, or nvidia_peermem loaded")


def _check_names(profile: str, facts: Fields, interface: str, hcas: Sequence[str]) -> None:
    if not re.fullmatch(rf"[A-Za-z0-9._-]{{1,{_INTERFACE_LIMIT}}}", interface):
        raise RunbookError(
            where="interconnect interface",
            observed=repr(interface),
            expected="one exact interface name; Gloo takes no =, ^ or list",
            next_step="Correct interconnect_interface in the inventory.",
        )
    rule = facts.text("hcas")
    if (rule == "required") == bool(hcas) or rule == "optional":
        bad = [hca for hca in hcas if not re.fullmatch(r"[A-Za-z0-9_]+:\d+", hca)]
        if not bad:
            return
        observed, expected = ", ".join(bad), "device:port, e.g. mlx5_0:1"
    elif hcas:
        observed, expected = ", ".join(hcas), f"no RDMA port: profile {profile} uses none"
    else:
        observed, expected = "none", "the ports of the compute rails, e.g. mlx5_0:1"
    raise RunbookError(
        where="interconnect RDMA ports",
        observed=observed,
        expected=expected,
        next_step="Correct interconnect_hcas in the inventory.",
    )


def _check_line(file: str, setting: Setting) -> None:
    if not _NAME.fullmatch(setting.name):
        raise _unwritable(file, setting, "a name of capitals, digits and underscores")
    if re.search(r"[\x00-\x1f\x7f]", setting.value):
        raise _unwritable(file, setting, "a value of one line, without control characters")
    if setting.value != setting.value.strip() or setting.value[:1] in ("'", '"'):
        raise _unwritable(file, setting, "a value without outer spaces and quotes, which would become part of it")


def _unwritable(file: str, setting: Setting, expected: str) -> RunbookError:
    return RunbookError(
        where=f"{file}: {setting.name or 'empty name'}",
        observed=repr(setting.value[:60]),
        expected=expected,
        next_step="Correct interconnect_variables in the inventory.",
    )
