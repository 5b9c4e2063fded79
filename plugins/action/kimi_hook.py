"""Call a site's hook from the controller. Headers name environment variables, so no secret passes through Ansible."""

from __future__ import annotations

import os

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

from kimi_runbook.errors import RunbookError
from kimi_runbook.transaction.hook import call, parse_hook


class ActionModule(ActionBase):
    """Arguments: hook (url or command, see the role), name (of the variable, for messages). Returns ``said``."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        """Read the hook and call it; in check mode only read it. An empty hook is nothing to call."""
        result = super().run(tmp, task_vars)
        args = self._task.args
        if not args["hook"]:
            return {**result, "changed": False, "skipped": True}
        try:
            hook = parse_hook(args["hook"], args["name"])
            said = "" if self._task.check_mode else call(hook, os.environ)
        except RunbookError as error:
            raise AnsibleActionFail(str(error)) from error
        return {**result, "changed": True, "called": hook.what, "said": said}
