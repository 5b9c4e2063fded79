#!/usr/bin/python
"""After an acceptance: let go of engine images that are neither accepted nor the one to roll back to."""

from __future__ import annotations

DOCUMENTATION = r"""
module: image_prune
short_description: Remove engine images this project pulled, all but the accepted one and the one before it
description:
  - Called after an accepted verdict only, so no layer goes while it may still be needed.
  - Touches only images with a tag of this project, and of those only the ones no container uses and nobody else has
    tagged. The two that stay are noted on the host.
options:
  reference:
    description: The image that has just been accepted, C(repository@sha256:...).
    type: str
    required: true
  note:
    description: Where the accepted digests are noted, newest first.
    type: path
    default: /var/lib/kimi-runbook/accepted_images.json
  keep:
    description: How many accepted images stay.
    type: int
    default: 2
  socket:
    description: Docker's socket.
    type: path
    default: /var/run/docker.sock
author:
  - kimi-runbook authors (@kimi-runbook)
attributes:
  check_mode:
    support: full
    description: Names what would be removed.
  diff_mode:
    support: none
    description: An image is no text.
"""

EXAMPLES = r"""
- name: Let go of images before the last accepted one
  image_prune:
    reference: vllm/vllm-openai@sha256:e90e...
"""

RETURN = r"""
kept:
  description: Digests that stay because they were accepted.
  returned: success
  type: list
removed:
  description: Digests whose images were removed.
  returned: success
  type: list
in_use:
  description: Digests that a container uses, and what Docker would not remove, with its words.
  returned: success
  type: list
"""

import json
import os

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.docker_socket import OWN_REPOSITORY, SOCKET, Docker, DockerError

OWN_TAG = f"{OWN_REPOSITORY}:"


def read_note(path):
    """Return the accepted digests, newest first; none where there is no readable note."""
    try:
        with open(path, encoding="utf-8") as file:
            told = json.load(file)["accepted"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [digest for digest in told if isinstance(digest, str)] if isinstance(told, list) else []


def plan(images, containers, accepted):
    """Return ``({digest: references to remove}, digests in use)`` of images with a tag of ours that are not accepted.

    Args:
        images: As ``GET /images/json`` answers.
        containers: As ``GET /containers/json`` answers, stopped ones included.
        accepted: Digests that stay.
    """
    found, in_use = {}, []
    used = {container.get("ImageID") for container in containers}
    for image in images:
        tags = image.get("RepoTags") or []
        digests = image.get("RepoDigests") or []
        ours = [tag for tag in tags if tag.startswith(OWN_TAG)]
        known = {entry.partition("@")[2] for entry in digests}
        if not ours or known & set(accepted):
            continue
        name = min(known, default=image.get("Id", ""))
        if image.get("Id") in used:
            in_use.append(name)
            continue
        others = [tag for tag in tags if tag not in ours and not tag.startswith("<none>")]
        found[name] = ours + ([] if others else digests)
    return found, in_use


def main():
    """Note, choose, remove."""
    module = AnsibleModule(
        argument_spec={
            "reference": {"type": "str", "required": True},
            "note": {"type": "path", "default": "/var/lib/kimi-runbook/accepted_images.json"},
            "keep": {"type": "int", "default": 2},
            "socket": {"type": "path", "default": SOCKET},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(**run(module.params, check_mode=module.check_mode))
    except (DockerError, OSError) as error:
        module.fail_json(msg=f"images of this project: {error}; expected Docker to answer. Accepted images stay.")


def run(params, *, check_mode=False):
    """Return the module's result."""
    digest = params["reference"].partition("@")[2]
    before = read_note(params["note"])
    accepted = [digest, *(told for told in before if told != digest)][: max(params["keep"], 1)]
    docker = Docker(params["socket"])
    containers = docker.call("GET", "/containers/json", {"all": "1"}) or []
    chosen, in_use = plan(docker.call("GET", "/images/json") or [], containers, accepted)
    removed = []
    if not check_mode:
        if accepted != before:
            write_note(params["note"], accepted)
        for name, references in chosen.items():
            refusal = remove(docker, references)
            if refusal:
                in_use.append(f"{name}: {refusal}")
            else:
                removed.append(name)
    else:
        removed = list(chosen)
    return {
        "changed": bool(removed) or accepted != before,
        "kept": accepted,
        "removed": removed,
        "in_use": in_use,
    }


def remove(docker, references):
    """Remove an image by its names; return Docker's words where it would not."""
    for reference in references:
        try:
            docker.call("DELETE", f"/images/{reference}")
        except DockerError as error:
            if error.status != 404:  # the last name took the image with it
                return str(error)
    return ""


def write_note(path, accepted):
    """Write the note whole."""
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    temporary = f"{path}.new"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump({"schema_version": 1, "accepted": accepted}, file)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


if __name__ == "__main__":
    main()
