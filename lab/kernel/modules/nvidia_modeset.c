// SPDX-License-Identifier: GPL-2.0
/* Stand-in for nvidia_modeset: depends on nvidia, nvidia_drm depends on it. */
#include "standin.h"

int kimi_nvidia_modeset_version(void)
{
	return kimi_nvidia_version();
}
EXPORT_SYMBOL(kimi_nvidia_modeset_version);

static int __init modeset_init(void)
{
	return kimi_nvidia_version();
}

static void __exit modeset_exit(void)
{
}

module_init(modeset_init);
module_exit(modeset_exit);
STANDIN("NVIDIA mode setting");
