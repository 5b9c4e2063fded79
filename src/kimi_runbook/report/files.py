"""The report's files: written beside the record, and written again from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from kimi_runbook.errors import RunbookError
from kimi_runbook.record import FILE_NAME, Record, load_record
from kimi_runbook.report.as_html import html
from kimi_runbook.report.as_junit import junit
from kimi_runbook.report.as_markdown import markdown
from kimi_runbook.report.as_prometheus import prometheus

HTML = "report.html"
MARKDOWN = "report.md"
JUNIT = "junit.xml"
PROMETHEUS = "metrics.prom"

_FINDINGS = "findings.json"  # as the audit names it (plugins/action/kimi_judge.py)

FORMS: Mapping[str, Callable[[Record], str]] = {
    HTML: html,
    MARKDOWN: markdown,
    JUNIT: junit,
    PROMETHEUS: prometheus,
}
"""Every file of a report, and what makes it from a record."""


def write_reports(record: Record, run_dir: Path) -> tuple[Path, ...]:
    """Write every form of the report into a run directory, each whole or not at all, and return their paths.

    Raises:
        RunbookError: The directory does not take the files, e.g. because the disk is full; the record is not touched.
    """
    written = []
    for name, make in FORMS.items():
        path, draft = run_dir / name, run_dir / f".{name}.new"
        try:
            try:
                draft.write_text(make(record), encoding="utf-8")
                draft.replace(path)
            finally:
                draft.unlink(missing_ok=True)
        except OSError as error:
            raise RunbookError(
                where=str(path),
                observed=f"cannot be written ({error.strerror or error})",
                expected="room for the reports beside the record",
                next_step=f"Free space, then: kimi-runbook report {run_dir}",
            ) from error
        written.append(path)
    return tuple(written)


def run_of(path: Path) -> Path:
    """Return the run directory that a path names: itself, or the directory of its record.json.

    Raises:
        RunbookError: It is neither, or no acceptance was run there.
    """
    run_dir = path.parent if path.name == FILE_NAME and path.is_file() else path
    if not run_dir.is_dir():
        raise RunbookError(
            where=str(path),
            observed="is no directory",
            expected=f"a run directory with a {FILE_NAME}",
            next_step="List runs with: ls runs",
        )
    if not (run_dir / FILE_NAME).exists():
        audited = (run_dir / _FINDINGS).exists()
        raise RunbookError(
            where=str(run_dir),
            observed=f"no acceptance was run here{f', only an audit ({_FINDINGS})' if audited else ''}",
            expected=f"a run with a {FILE_NAME}",
            next_step="Run one: ansible-playbook playbooks/accept.yml; or, without an inventory: kimi-runbook accept "
            "--endpoint URL",
        )
    return run_dir


def regenerate(run_dir: Path) -> Record:
    """Write a finished run's reports again from its record.json and return the record; raises RunbookError."""
    record = load_record(run_dir)
    write_reports(record, run_dir)
    return record
