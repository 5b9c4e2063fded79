"""Next steps in the words of whoever runs the chain: playbooks and variables on a site, options on the command line."""

from __future__ import annotations

from dataclasses import replace

from kimi_runbook.acceptance.result import StepResult
from kimi_runbook.reading import data_file


def for_an_endpoint(result: StepResult) -> StepResult:
    """Return the result with next steps that need no inventory (data/endpoint_words.yml)."""
    words = [(item.text("site"), item.text("endpoint")) for item in data_file("endpoint_words.yml").each("words")]

    def said(text: str) -> str:
        for site, endpoint in words:
            text = text.replace(site, endpoint)
        return text

    checks = tuple(
        replace(check, next_step=said(check.next_step), expected=said(check.expected)) for check in result.checks
    )
    return replace(result, checks=checks)
