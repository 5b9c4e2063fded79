"""Filters of the driver role: names, files and versions of the locked driver. The logic is the library's.

A file of its own, because every task of every host starts a process that loads the filters it meets.
"""

from __future__ import annotations

from ansible.errors import AnsibleFilterError

from kimi_runbook import driver_packages, driver_proof
from kimi_runbook.errors import RunbookError


def _told(function):
    """Turn the library's error into Ansible's, word for word."""

    def wrapper(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except RunbookError as error:
            raise AnsibleFilterError(str(error)) from error

    return wrapper


class FilterModule:
    """The filters, all named kimi_driver_* or kimi_dnf_*."""

    def filters(self):
        """Return name to function."""
        return {
            "kimi_dnf_locks": driver_packages.lock_lines,
            "kimi_driver_asked": driver_packages.asked_names,
            "kimi_driver_companions": driver_packages.installed_companions,
            "kimi_driver_parameters": driver_packages.parameter_names,
            "kimi_driver_parameter_file": _told(driver_packages.parameter_file),
            "kimi_driver_paths": driver_packages.known_paths,
            "kimi_driver_preferences": driver_packages.preferences,
            "kimi_driver_repository": _told(driver_packages.repository),
            "kimi_driver_set": driver_packages.driver_set,
            "kimi_driver_source_files": _told(driver_packages.source_files),
            "kimi_driver_stops": driver_packages.stops,
            "kimi_driver_unequal": _told(driver_proof.unequal_of),
        }
