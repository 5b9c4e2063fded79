#!/usr/bin/python
"""Make Docker hold an image by digest: from its registry, a mirror, or what was staged on the host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: image_pull
short_description: Make Docker hold an image by digest, with a limit on time and silence
description:
  - Looks for the digest among the RepoDigests of all images first; an image id proves nothing and is never compared.
  - What was staged (M(image_stage)) is tried first and needs no network. Docker pulls it from a registry on the
    loopback address that lives as long as the pull, since loading an archive would lose the digest in Docker's classic
    store.
    What was staged is removed once the image is proved.
  - Then the reference itself, then each mirror, each with its attempts. Docker keeps finished layers between attempts.
  - The image gets a tag of this project, so that C(docker image prune) leaves it alone; Docker counts an image that has
    digests and no tag as dangling. The image before it keeps its own tag until M(image_prune) is called.
  - A login that root's Docker configuration has for the registry is used, and none is ever stored.
options:
  reference:
    description: C(repository@sha256:...).
    type: str
    required: true
  mirrors:
    description: Repositories that may have the same digest, tried in order.
    type: list
    elements: str
    default: []
  architecture:
    description: As the kernel or OCI names it.
    type: str
    required: true
  staged:
    description: Folder of M(image_stage).
    type: path
    default: /var/lib/kimi-runbook/stage/image
  port:
    description: Port of the loopback registry; it becomes part of the name a staged image has on the host.
    type: int
    default: 5127
  bytes_needed:
    description: Free room the pull needs where Docker's store lies.
    type: int
    default: 0
  inodes_needed:
    description: Free inodes it needs there.
    type: int
    default: 0
  attempts:
    description: Attempts per source.
    type: int
    default: 3
  silence_s:
    description: Seconds without a sign of life after which an attempt is given up.
    type: int
    default: 300
  timeout_s:
    description: Seconds for all of it.
    type: int
    default: 7200
  socket:
    description: Docker's socket.
    type: path
    default: /var/run/docker.sock
author:
  - kimi-runbook authors (@kimi-runbook)
attributes:
  check_mode:
    support: full
    description: Says whether the digest is held; asks no registry.
  diff_mode:
    support: none
    description: An image is no text.
"""

EXAMPLES = r"""
- name: Pull the engine image
  image_pull:
    reference: vllm/vllm-openai@sha256:e90e...
    mirrors: ["mirror.example:5000/vllm/vllm-openai"]
    architecture: x86_64
"""

RETURN = r"""
name:
  description: The reference under which the host holds the digest.
  returned: success
  type: str
source:
  description: Where it came from; empty when it was there.
  returned: success
  type: str
bytes:
  description: Bytes Docker said it fetched.
  returned: success
  type: int
layers_held:
  description: Layers that were there already.
  returned: success
  type: int
attempts:
  description: Attempts that were made.
  returned: success
  type: int
seconds:
  description: How long it took.
  returned: success
  type: float
"""

import os
import re
import shutil
import threading
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.docker_socket import (
    OWN_REPOSITORY,
    SOCKET,
    Docker,
    DockerError,
    Progress,
    familiar,
    login_header,
    names_of,
    store_path,
)
from ansible.module_utils.oci_blobs import Blobs, Loopback
from ansible.module_utils.proved_files import FilesError, sort_out

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_LONGEST_WAIT_S = 30


class PullError(Exception):
    """Why no source gave the image."""


def own_tag(digest):
    """Return the tag that protects an image from being pruned."""
    return "sha256-" + digest.partition(":")[2][:16]


def main():
    """Look, check the room, pull, prove, tag."""
    module = AnsibleModule(
        argument_spec={
            "reference": {"type": "str", "required": True},
            "mirrors": {"type": "list", "elements": "str", "default": []},
            "architecture": {"type": "str", "required": True},
            "staged": {"type": "path", "default": "/var/lib/kimi-runbook/stage/image"},
            "port": {"type": "int", "default": 5127},
            "bytes_needed": {"type": "int", "default": 0},
            "inodes_needed": {"type": "int", "default": 0},
            "attempts": {"type": "int", "default": 3},
            "silence_s": {"type": "int", "default": 300},
            "timeout_s": {"type": "int", "default": 7200},
            "socket": {"type": "path", "default": SOCKET},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(**Pull(module.params).run(check_mode=module.check_mode))
    except (PullError, DockerError, FilesError, OSError) as error:
        module.fail_json(
            msg=f"image {module.params['reference']}: {error}. The image that runs was not touched; correct the cause "
            "and run again."
        )


class Pull:
    """One image on its way into Docker's store."""

    def __init__(self, params):
        self.params = params
        self.repository, _, self.digest = params["reference"].partition("@")
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", self.digest):
            raise PullError("no digest in it; expected repository@sha256:<64 hexadecimal digits>")
        self.docker = Docker(params["socket"])
        self.progress = Progress()
        self.began = time.monotonic()
        self.attempts = 0
        self.patience = threading.Event()

    def run(self, *, check_mode=False):
        """Return the module's result."""
        held = self.held()
        if held is None:
            if check_mode:
                return self.result(self.params["reference"], "", changed=True)
            self.require_room()
            source = self.bring()
            held = self.held()
            if held is None:
                raise PullError(f"pulled from {source}, but no image has {self.digest} among its RepoDigests")
            self.require_architecture(held)
            self.protect(held)
            if source == self.params["staged"]:
                shutil.rmtree(source)  # as large as the image, and of no more use
            return self.result(held, source, changed=True)
        self.require_architecture(held)
        return self.result(held, "", changed=self.protect(held, check_mode=check_mode))

    def result(self, name, source, *, changed):
        """Return what is reported."""
        return {
            "changed": changed,
            "name": name,
            "source": source,
            "bytes": self.progress.bytes,
            "layers_held": self.progress.layers_held,
            "attempts": self.attempts,
            "seconds": round(time.monotonic() - self.began, 1),
        }

    def held(self):
        """Return the name under which the digest is held, the wanted one first; None where it is not."""
        names = names_of(self.docker.call("GET", "/images/json") or [], self.digest)
        wanted = familiar(self.repository)
        if wanted in names:
            return self.params["reference"]
        return f"{names[0]}@{self.digest}" if names else None

    def require_room(self):
        """Refuse a pull that would fill the store really in use."""
        info = self.docker.call("GET", "/info") or {}
        store = store_path(info, info.get("DockerRootDir") or "/var/lib/docker")
        place = store
        while not os.path.exists(place):
            place = os.path.dirname(place)
        room = os.statvfs(place)
        free = room.f_bavail * room.f_frsize
        if free < self.params["bytes_needed"]:
            raise PullError(f"{store}: {free} bytes free, expected {self.params['bytes_needed']}; free space there")
        # A file system that counts no inodes (btrfs) says 0 of 0.
        if room.f_files and room.f_favail < self.params["inodes_needed"]:
            raise PullError(f"{store}: {room.f_favail} inodes free, expected {self.params['inodes_needed']}")

    def bring(self):
        """Pull from the first source that gives it; return that source."""
        refusals = []
        if self.is_staged():
            try:
                with Loopback(Blobs(self.params["staged"]), self.params["port"]) as registry:
                    name = self.repository.partition("/")[2] or self.repository
                    self.pull(f"127.0.0.1:{registry.port}/{name}")
                return self.params["staged"]
            except (DockerError, OSError) as error:
                refusals.append(f"{self.params['staged']}: {error}")
        for repository in [self.repository, *self.params["mirrors"]]:
            try:
                self.pull(repository)
            except DockerError as error:
                refusals.append(f"{repository}: {error}")
                continue
            return repository
        raise PullError("; ".join(refusals))

    def is_staged(self):
        """Whether all the image needs lies in the stage, proved."""
        blobs = Blobs(self.params["staged"])
        architecture = ARCHITECTURES.get(self.params["architecture"], self.params["architecture"])
        needed = blobs.needs(self.digest, architecture)
        return needed is not None and not sort_out(blobs.folder, needed, blobs.record)["missing"]

    def pull(self, repository):
        """Pull by digest, again after what may pass; DockerError with the last words."""
        for attempt in range(1, self.params["attempts"] + 1):
            self.attempts += 1
            try:
                self.pull_once(repository)
                return
            except DockerError as error:
                if attempt == self.params["attempts"] or final(str(error)) or self.left_s() <= 0:
                    raise
            self.patience.wait(min(2**attempt, _LONGEST_WAIT_S, max(self.left_s(), 0)))

    def pull_once(self, repository):
        """Follow one pull to its end."""
        silence_s = min(self.params["silence_s"], max(self.left_s(), 1))
        query = {"fromImage": repository, "tag": self.digest}
        for event in self.docker.stream("POST", "/images/create", query, login_header(repository), silence_s):
            self.progress.take(event)
            if self.left_s() <= 0:
                raise DockerError(f"not done after {self.params['timeout_s']} s (engine_image_pull_timeout_s)")

    def left_s(self):
        """Return the seconds left."""
        return self.params["timeout_s"] - (time.monotonic() - self.began)

    def require_architecture(self, held):
        """Refuse an image whose programs this host cannot start."""
        told = (self.docker.call("GET", f"/images/{held}/json") or {}).get("Architecture")
        wanted = ARCHITECTURES.get(self.params["architecture"], self.params["architecture"])
        if told and told != wanted:
            raise PullError(
                f"image.architecture: {held} is for {told}, expected {wanted}; lock the index of all architectures"
            )

    def protect(self, held, *, check_mode=False):
        """Give the image the tag that keeps it; return whether it lacked it."""
        tag = own_tag(self.digest)
        row = self.docker.call("GET", f"/images/{held}/json") or {}
        if f"{OWN_REPOSITORY}:{tag}" in (row.get("RepoTags") or []):
            return False
        if not check_mode:
            self.docker.call("POST", f"/images/{held}/tag", {"repo": OWN_REPOSITORY, "tag": tag})
        return True


def final(text):
    """Whether another attempt would only repeat what Docker said."""
    words = (
        *("not found", "manifest unknown", "no matching manifest", "denied", "unauthorized", "no space left"),
        "server gave http response",  # a plain-HTTP registry that the daemon was not told to trust
    )
    return any(word in text.lower() for word in words)


if __name__ == "__main__":
    main()
