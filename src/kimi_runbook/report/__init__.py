"""The report: a page to sign (HTML, Markdown), the same checks for machines (JUnit) and figures (Prometheus).

Made from the record alone, so it can be made again at any time. Everything in a record may come from an engine, a log
or a proxy: it is shown as text and never as markup.
"""

from kimi_runbook.report.as_html import html
from kimi_runbook.report.as_junit import junit
from kimi_runbook.report.as_markdown import markdown
from kimi_runbook.report.as_prometheus import prometheus
from kimi_runbook.report.files import FORMS, HTML, JUNIT, MARKDOWN, PROMETHEUS, regenerate, run_of, write_reports
from kimi_runbook.report.summary import headline, older, verdict_of, what_next

__all__ = [
    "FORMS",
    "HTML",
    "JUNIT",
    "MARKDOWN",
    "PROMETHEUS",
    "headline",
    "html",
    "junit",
    "markdown",
    "older",
    "prometheus",
    "regenerate",
    "run_of",
    "verdict_of",
    "what_next",
    "write_reports",
]
