// SPDX-License-Identifier: GPL-2.0
/* Stand-in for nvidia_drm: depends on nvidia_modeset and nvidia. */
#include "standin.h"

static int __init drm_init(void)
{
	return kimi_nvidia_version() ?: kimi_nvidia_modeset_version();
}

static void __exit drm_exit(void)
{
}

module_init(drm_init);
module_exit(drm_exit);
STANDIN("NVIDIA DRM");
