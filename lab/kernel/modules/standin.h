/* SPDX-License-Identifier: GPL-2.0 */
/* Stand-ins for NVIDIA's open kernel modules: names, versions, dependencies and reference counts; no GPU. */
#ifndef KIMI_STANDIN_H
#define KIMI_STANDIN_H

#include <linux/module.h>

#define STANDIN(what)                                                    \
	MODULE_LICENSE("Dual MIT/GPL");                                  \
	MODULE_VERSION(DRIVER_VERSION);                                  \
	MODULE_DESCRIPTION(what " (kimi-runbook stand-in, no GPU)")

/* What makes one module depend on another, as modprobe and /sys/module/<name>/holders see it. */
extern int kimi_nvidia_version(void);
extern int kimi_nvidia_modeset_version(void);

#endif
