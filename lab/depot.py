"""The depot: one machine with the package repositories and the image registry, so that hosts need nothing else."""

from __future__ import annotations

import hashlib
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from lab.commands import await_condition
from lab.docker import Docker
from lab.machines import File, Spec, await_boot, is_current, mark_prepared, recreate
from lab.progress import Step
from lab.settings import DEPOT, REGISTRY, REGISTRY_PORT, REPOSITORIES_URL, REPOSITORY_PORT
from lab.standin.repository import build_repositories

REPOSITORIES = "/srv/apt"
SERVICE_TIMEOUT_S = 30

_REGISTRY_CONFIGURATION = f"""\
version: 0.1
log:
  level: warn
storage:
  filesystem:
    rootdirectory: /srv/registry
  delete:
    enabled: true
http:
  addr: :{REGISTRY_PORT}
"""
_UNIT = """\
[Unit]
Description={description}
After=network.target

[Service]
ExecStartPre=/usr/bin/mkdir -p {directory}
ExecStart={command}
Restart=always

[Install]
WantedBy=multi-user.target
"""
_REGISTRY_UNIT = _UNIT.format(
    description="Lab image registry",
    directory="/srv/registry",
    command="/usr/bin/docker-registry serve /etc/kimi-lab/registry.yml",
)
_REPOSITORY_UNIT = _UNIT.format(
    description="Lab package repositories over HTTP",
    directory=REPOSITORIES,
    command=f"/usr/bin/python3 -m http.server {REPOSITORY_PORT} --directory {REPOSITORIES}",
)


def depot_spec(image: str) -> Spec:
    """Return what the depot is made from."""
    return Spec(
        machine=DEPOT,
        image=image,
        files={
            "/etc/kimi-lab/registry.yml": File(_REGISTRY_CONFIGURATION.encode()),
            "/etc/systemd/system/kimi-lab-registry.service": File(_REGISTRY_UNIT.encode()),
            "/etc/systemd/system/kimi-lab-repositories.service": File(_REPOSITORY_UNIT.encode()),
        },
    )


def build(cache: Path, gnupg_home: Path, debian: Path, step: Step) -> Path:
    """Build and sign the package repositories; return the directory that has them."""
    output = cache / "apt"
    changed = build_repositories(output, gnupg_home, {"debian": debian})
    step.outcome = "built" if changed else "unchanged"
    return output


def ensure(docker: Docker, image: str, repositories: Path, step: Step) -> None:
    """Bring the depot up with its two services answering and the repositories as they were built.

    Raises:
        RunbookError: When the machine does not boot or a service does not answer.
    """
    spec = depot_spec(image)
    outcome = "unchanged"
    if not is_current(docker, spec):
        step.say("making the machine")
        recreate(docker, spec, keep_volume=True)
        await_boot(docker, DEPOT.name)
        docker.shell(
            DEPOT.name, "systemctl enable --now --quiet kimi-lab-registry.service kimi-lab-repositories.service"
        )
        mark_prepared(docker, spec)
        outcome = "made"
    if published(docker) != signatures(repositories):
        step.say("copying the package repositories")
        publish(docker, repositories)
        outcome = "made" if outcome == "made" else "repositories renewed"
    for url in (f"http://{REGISTRY}/v2/", f"{REPOSITORIES_URL}/debian/dists/stable/InRelease"):
        await_url(url)
    step.outcome = outcome


def signatures(repositories: Path) -> dict[str, str]:
    """Return {path below the repositories: SHA-256} of all index and signature files."""
    return {
        str(path.relative_to(repositories)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(repositories.glob("*/dists/**/*"))
        if path.is_file()
    }


def parse_sums(text: str) -> dict[str, str]:
    """Return {path: SHA-256} from the output of sha256sum."""
    sums = (line.split(maxsplit=1) for line in text.splitlines())
    return {path.removeprefix("./"): digest for digest, path in sums}


def published(docker: Docker) -> Mapping[str, str]:
    """Return what the depot offers, as :func:`signatures` does."""
    find = "find . -path './*/dists/*' -type f -exec sha256sum {} +"
    return parse_sums(docker.shell(DEPOT.name, f"mkdir -p {REPOSITORIES}; cd {REPOSITORIES}; {find}"))


def publish(docker: Docker, repositories: Path) -> None:
    """Replace what the depot offers, whole."""
    docker.shell(DEPOT.name, f"rm -rf {REPOSITORIES}.new {REPOSITORIES}.old")
    docker.must("cp", str(repositories), f"{DEPOT.name}:{REPOSITORIES}.new", where=DEPOT.name)
    swap = f"mv {REPOSITORIES} {REPOSITORIES}.old; mv {REPOSITORIES}.new {REPOSITORIES}"
    docker.shell(DEPOT.name, f"{swap}; rm -rf {REPOSITORIES}.old")


def await_url(url: str) -> None:
    """Wait until an address of the depot answers.

    Raises:
        RunbookError: After 30 s.
    """

    def question() -> str | None:
        try:
            with urllib.request.urlopen(url, timeout=5):  # noqa: S310 - one of the lab's own http addresses
                return None
        except (urllib.error.URLError, OSError) as error:
            return str(error)

    await_condition(
        question,
        where=url,
        expected="an answer over HTTP",
        timeout_s=SERVICE_TIMEOUT_S,
        next_step=f"Read `docker exec {DEPOT.name} journalctl --boot --priority warning`.",
    )
