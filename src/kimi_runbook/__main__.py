"""``python -m kimi_runbook``: the same as ``kimi-runbook``."""

import sys

from kimi_runbook.cli import main

sys.exit(main())
