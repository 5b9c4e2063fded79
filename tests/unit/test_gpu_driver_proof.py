"""The proof after a driver change, and what the plan announces of parameters: one value away from a right host."""

import pytest
from judging import TARGET, snapshot_of

from kimi_runbook.driver_proof import unequal
