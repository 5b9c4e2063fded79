"""``python -m lab.kernel``."""

import sys

from lab.kernel.cli import main

sys.exit(main())
