#!/usr/bin/python
"""Bring an image to a host as blobs, before any container runtime is there."""

from __future__ import annotations

DOCUMENTATION = r"""
module: image_stage
short_description: Fetch an image's blobs by digest, from a registry, a mirror or an OCI archive
description:
  - Keeps index, manifest, configuration and layers of one architecture byte for byte in a folder, each proved by its
    digest. The module M(image_pull) hands them to Docker later, with no network and with the digest kept.
  - A transfer that was cut goes on where it stopped. What is proved is remembered and not read again.
options:
  reference:
    description: C(repository@sha256:...).
    type: str
    required: true
  mirrors:
    description: Repositories that may have the same digest, asked in order when the first one fails.
    type: list
    elements: str
    default: []
  archive:
    description: An OCI archive on the host to take the blobs from instead.
    type: path
  architecture:
    description: As the kernel or OCI names it.
    type: str
    required: true
  insecure:
    description: The registries speak plain HTTP.
    type: bool
    default: false
  folder:
    description: Where the blobs go.
    type: path
    default: /var/lib/kimi-runbook/stage/image
  workers:
    description: Blobs fetched at the same time.
    type: int
    default: 4
  attempts:
    description: Attempts without a byte more before a source is given up.
    type: int
    default: 5
author:
  - kimi-runbook authors (@kimi-runbook)
attributes:
  check_mode:
    support: full
    description: Says whether anything would be fetched.
  diff_mode:
    support: none
    description: Blobs are no text.
"""

EXAMPLES = r"""
- name: Fetch the image ahead of the window
  image_stage:
    reference: vllm/vllm-openai@sha256:e90e...
    architecture: x86_64
"""

RETURN = r"""
staged:
  description: Whether all the image needs is here.
  returned: success
  type: bool
source:
  description: The repository or archive that gave the image; empty when it was here already.
  returned: success
  type: str
bytes:
  description: Size of the image's blobs.
  returned: success
  type: int
fetched_bytes:
  description: Bytes that came in this run.
  returned: success
  type: int
"""

import os
import threading

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.oci_blobs import (
    INDEX_TYPES,
    Archive,
    Blobs,
    Registry,
    blobs_of,
    media_type,
    parse,
    platform_manifest,
)
from ansible.module_utils.proved_files import SPARE, FilesError, in_threads, sort_out

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_LONGEST_WAIT_S = 30


def main():
    """Look, then fetch what is missing from the first source that has all of it."""
    module = AnsibleModule(
        argument_spec={
            "reference": {"type": "str", "required": True},
            "mirrors": {"type": "list", "elements": "str", "default": []},
            "archive": {"type": "path"},
            "architecture": {"type": "str", "required": True},
            "insecure": {"type": "bool", "default": False},
            "folder": {"type": "path", "default": "/var/lib/kimi-runbook/stage/image"},
            "workers": {"type": "int", "default": 4},
            "attempts": {"type": "int", "default": 5},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(**run(module.params, check_mode=module.check_mode))
    except (FilesError, OSError) as error:
        module.fail_json(
            msg=f"image {module.params['reference']}: {error}. No service was touched and what was fetched is kept; "
            "correct the cause and run again."
        )


def run(params, *, check_mode=False):
    """Bring the image's blobs; FilesError says what every source lacks."""
    repository, _, digest = params["reference"].partition("@")
    architecture = ARCHITECTURES.get(params["architecture"], params["architecture"])
    blobs = Blobs(params["folder"])
    needed = blobs.needs(digest, architecture)
    if needed is not None and sort_out(blobs.folder, needed, blobs.record)["proved"] == sorted(needed):
        return {"changed": False, "staged": True, "source": "", "bytes": _size(needed), "fetched_bytes": 0}
    if check_mode:
        return {"changed": True, "staged": False, "source": "", "bytes": _size(needed or {}), "fetched_bytes": 0}
    refusals = []
    for name in [params["archive"]] if params.get("archive") else [repository, *params["mirrors"]]:
        try:
            source = Archive(name) if params.get("archive") else Registry(name, insecure=params["insecure"])
            needed = fetch(blobs, source, digest, architecture, params)
        except (FilesError, OSError) as error:
            refusals.append(str(error) if str(name) in str(error) else f"{name}: {error}")
            continue
        sizes = {"bytes": _size(needed), "fetched_bytes": blobs.fetched_bytes}
        return {"changed": True, "staged": True, "source": str(name), **sizes}
    raise FilesError("; ".join(refusals))


def _size(needed):
    return sum(blob["size"] for blob in needed.values())


def fetch(blobs, source, digest, architecture, params):
    """Bring all an image needs from one source; return its blobs."""
    content = source.manifest(digest)
    top = parse(content, digest)
    documents = {digest: content}
    if media_type(top) in INDEX_TYPES:
        chosen = platform_manifest(top, architecture)
        documents[chosen] = source.manifest(chosen)
        top = parse(documents[chosen], chosen)
    needed = blobs_of(top)
    source.expect(needed)
    found = sort_out(blobs.folder, needed, blobs.record)
    missing = found["missing"]
    for name, result in in_threads(found["unproved"], params["workers"], blobs.hash):
        if result == name:
            blobs.remember(name, name)
        else:
            missing.append(name)
    sizes = {name: needed[name]["size"] for name in missing}
    room, free = int(blobs.still_needed(missing, sizes) * SPARE), blobs.room()
    if room > free:
        raise FilesError(f"{blobs.folder}: {free} bytes free, expected {room}; free space there")
    os.makedirs(blobs.folder, mode=0o755, exist_ok=True)
    patience = threading.Event()

    def bring(name):
        return blobs.fetch(
            source,
            name,
            name,
            params["attempts"],
            lambda failures: patience.wait(min(2**failures, _LONGEST_WAIT_S)),
        )

    failures = []
    for name, result in in_threads(missing, params["workers"], bring):
        if isinstance(result, Exception):
            failures.append(str(result))
        else:
            blobs.remember(name, name)
    if failures:
        raise FilesError(sorted(failures)[0])
    blobs.tidy()
    for key, text in documents.items():
        blobs.keep(key, text)
    if architecture not in (told := config_architecture(blobs, top), ""):
        raise FilesError(f"image.arch_missing: the image is for {told}, expected {architecture}")
    return needed


def config_architecture(blobs, manifest):
    """Return what the image's configuration says it runs on; an image without an index is known by nothing else."""
    return str((blobs.document(manifest["config"]["digest"]) or {}).get("architecture") or "")


if __name__ == "__main__":
    main()
