"""Rules about the engine: its ports, and what its container really runs with."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from kimi_runbook.driver_verdict import process_matches
from kimi_runbook.environment import differing, may_report
from kimi_runbook.expected import ExpectedEngine
from kimi_runbook.host_facts import ContainerFacts, Listener
from kimi_runbook.interconnect import debug_variables
from kimi_runbook.launch import same_arguments
from kimi_runbook.reading import data_file
from kimi_runbook.rules import Case, Check, Outcome, Unknown
from kimi_runbook.rules.service import silent
from kimi_runbook.rules.state import told_apart


def _free_ports(case: Case) -> Outcome:
    wanted = case.expected.engine
    if wanted is not None and wanted.serves_http:
        yield from _ports(case, wanted)


def _container(case: Case) -> Outcome:
    wanted, container = case.expected.engine, case.snapshot.container
    if wanted is None:
        return
    yield from _unit(case, wanted)
    if container is None and silent(case):
        yield Unknown("engine: container")
        return
    if container is None or not container.running:
        yield case.finding(
            "engine.absent",
            observed=f"container {wanted.container} {'absent' if container is None else 'stopped'}",
            expected="running",
        )
        return
    yield from _image(case, container)
    yield from _launch(case, wanted, container)
    yield from _files(case, container)
    yield from _age(case, container)
    if container.restart_count > 0:
        yield case.finding("engine.restarted", observed=f"{container.restart_count} restarts", expected="none")
    for name in sorted(container.env):
        if name in debug_variables():
            yield case.finding(
                "interconnect.debug_leftover",
                observed=f"{name}={container.env[name]} in container {container.name}",
                expected="not set",
                subject=name,
            )


def _ports(case: Case, wanted: ExpectedEngine) -> Outcome:
    reported: set[tuple[int, int | None, str | None]] = set()
    for listener in case.snapshot.network.listening:
        who = (listener.port, listener.pid, listener.process)
        if listener.port not in wanted.ports or who in reported or _is_ours(listener, wanted, case.snapshot.container):
            continue
        reported.add(who)
        yield case.finding(
            "port.taken",
            observed=f"port {listener.port}: {listener.process or 'an unknown process'}"
            + (f" (pid {listener.pid})" if listener.pid else "")
            + f" listens on {listener.address or 'it'}",
            expected=f"free, or held by {wanted.container}",
            subject=str(listener.port),
        )


def _is_ours(listener: Listener, wanted: ExpectedEngine, container: ContainerFacts | None) -> bool:
    """Whether the engine itself listens: its container runs, and process or pid do not speak against it.

    The listener may be a child of the container's first process, so another pid alone proves nothing.
    """
    if container is None or not container.running or container.name != wanted.container:
        return False
    if listener.container is not None:
        return listener.container in (container.name, container.id)
    if listener.pid is None or listener.pid == container.pid or listener.process is None:
        return True
    return process_matches(listener.process, data_file("platform.yml").texts("engine_server_processes"))


def _image(case: Case, container: ContainerFacts) -> Outcome:
    image = case.expected.image
    if image is None:
        return
    references = (container.image_reference or "", *container.image_repo_digests)
    if not any(reference.partition("@")[2] == image.digest for reference in references):
        yield case.finding(
            "engine.image", observed=container.image_reference or "an unknown image", expected=image.reference
        )


def _launch(case: Case, wanted: ExpectedEngine, container: ContainerFacts) -> Outcome:
    if wanted.args is not None and not same_arguments(container.args, wanted.args):
        missing = [argument for argument in wanted.args if argument not in container.args]
        extra = [argument for argument in container.args if argument not in (*wanted.args, "serve")]
        yield case.finding(
            "engine.args",
            observed=" ".join(extra) or ("another order" if not missing else f"without {' '.join(missing)}"),
            expected=" ".join(missing) or "the arguments of the inventory, no others",
        )
    asked = wanted.env or {}
    for name in differing(container.env, asked):  # names on the allow-list only, so their values may be shown
        yield case.finding(
            "engine.env",
            observed=f"{name}={container.env[name]}" if name in container.env else f"{name} not set",
            expected=asked[name],
            subject=name,
        )


def _unit(case: Case, wanted: ExpectedEngine) -> Outcome:
    """What the engine's unit sets beside the container's own environment; the command it runs carries the rest."""
    asked = wanted.env
    if asked is None:
        return
    for name, value in sorted(case.snapshot.engine.unit_env.items()):
        if may_report(name) and asked.get(name) != value:
            yield case.finding(
                "engine.unit_env",
                observed=f"{name}={value} in {wanted.unit}",
                expected=asked.get(name, "not set"),
                subject=name,
            )


def _age(case: Case, container: ContainerFacts) -> Outcome:
    """A container keeps the driver's files of the day it was created: older than the loaded driver, it is created anew.

    Without the moment of the load the boot stands in, since nothing is loaded before it.
    """
    boot, created = _moment(case.snapshot.boot.booted_at), _moment(container.created_at)
    if case.expected.driver_version is None or case.simulated:
        return
    if boot is None or created is None:
        if case.complete:
            yield Unknown("engine: container: created_at")
        return
    after = case.snapshot.driver.init_complete_s
    loaded = _later(boot, after or 0)
    if loaded is None:
        yield Unknown("driver: init_complete_s")
    elif created < loaded:
        yield case.finding(
            "engine.older_than_driver",
            observed=f"container {container.name} is of {_told(created)}",
            expected=f"created after {_told(loaded)}, when "
            + ("the host was booted" if after is None else f"driver {case.snapshot.driver.loaded} was loaded"),
            subject=case.expected.engine.unit if case.expected.engine else container.name,
        )
    elif after is None:
        yield Unknown("driver: init_complete_s")


def _moment(text: str | None) -> datetime | None:
    """Return a time in UTC, None for text that is none."""
    try:
        moment = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _later(moment: datetime, seconds: float) -> datetime | None:
    """Return a time so many seconds later, None where the calendar ends before."""
    try:
        return moment + timedelta(seconds=seconds)
    except (OverflowError, ValueError):
        return None


def _told(moment: datetime) -> str:
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}"


def _files(case: Case, container: ContainerFacts) -> Outcome:
    for file in case.expected.files:
        if file.path in container.files and file.sha256 and container.files[file.path] != file.sha256:
            inside = container.files[file.path]
            observed, expected = told_apart(container.settings.get(file.path), file.settings) or (
                f"sha256 {inside[:12]}" if inside else "missing",
                f"sha256 {file.sha256[:12]}",
            )
            yield case.finding(
                "engine.files",
                observed=f"{file.path} in the container: {observed}",
                expected=expected,
                subject=file.path,
            )


CHECKS = (Check("engine.ports", _free_ports), Check("engine.container", _container))
