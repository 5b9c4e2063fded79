"""Evidence: what explains a failure, kept with its hash, without secrets, and honest about what is missing."""

from kimi_runbook.evidence.freezing import Frozen, Part, freeze
from kimi_runbook.evidence.pseudonyms import Pseudonyms, run_key
from kimi_runbook.evidence.redactor import Redactor
from kimi_runbook.evidence.scan import Finding, scan_folder, scan_text

__all__ = ["Finding", "Frozen", "Part", "Pseudonyms", "Redactor", "freeze", "run_key", "scan_folder", "scan_text"]
