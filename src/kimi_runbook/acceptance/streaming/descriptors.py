"""The limit on open descriptors, of which every connection takes one."""

from __future__ import annotations

import resource

from kimi_runbook.errors import RunbookError
from kimi_runbook.reading import data_file


def require_descriptors(connections: int) -> None:
    """Make room for so many connections at once: raise this process's soft limit where it is too low.

    Raises:
        RunbookError: When the hard limit does not allow them.
    """
    needed = connections + data_file("client.yml").fields("connections").integer("other_descriptors")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise RunbookError(
            where=f"{connections} connections at once",
            observed=f"this process may open {hard} files and connections",
            expected=f"at least {needed}",
            next_step=f"Raise the limit (ulimit -Hn {needed}, or LimitNOFILE= of the unit), or ask for fewer at once.",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
