"""Ask the registry, from the controller, whether it has the locked digest for a host's architecture."""

from __future__ import annotations

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

from kimi_runbook.errors import RunbookError
from kimi_runbook.registry import verify_image


class ActionModule(ActionBase):
    """Arguments: reference (repository@digest), insecure, architecture as uname prints it."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        """Fetch the manifest, check its digest and the architecture."""
        result = super().run(tmp, task_vars)
        args = self._task.args
        try:
            manifest = verify_image(
                args["reference"], [args["architecture"]], insecure=bool(args.get("insecure", False))
            )
        except RunbookError as error:
            raise AnsibleActionFail(f"{error} Nothing was changed.") from error
        return {**result, "changed": False, "digest": manifest.digest}
