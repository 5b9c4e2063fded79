"""The limit on open descriptors, of which every connection takes one."""

from __future__ import annotations

import resource

from kimi_runbook.errors import RunbookError

# What a Python process with a report, a log and a few hosts' connections has open besides; a guess, well above it.
_BESIDES = 128


def require_descriptors(connections: int) -> None:
    """Make room for so many connections at once: raise this process's soft limit where it is too low.

    Raises:
        RunbookError: When the hard limit does not allow them.
    """
    needed = connections + _BESIDES
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
