"""Programs and state of the stand-in, as installed on hosts under /usr/lib/kimi-standin.

Standard library only: hosts have Debian's python3 and nothing else. The environment variable KIMI_STANDIN_ROOT puts a
directory in front of every path, so that the same programs run against a tree without root.
"""

NOTICE = "kimi-runbook stand-in: no GPU and no NVIDIA software behind it"
