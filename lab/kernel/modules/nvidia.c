// SPDX-License-Identifier: GPL-2.0
/* Stand-in for nvidia: /proc/driver/nvidia as the open module shows it, and a device that holds the module while open. */
#include <linux/fs.h>
#include <linux/miscdevice.h>
#include <linux/moduleparam.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>

#include "standin.h"

static int NVreg_GrdmaPciTopoCheckOverride;
module_param(NVreg_GrdmaPciTopoCheckOverride, int, 0444);
static int NVreg_CreateImexChannel0;
module_param(NVreg_CreateImexChannel0, int, 0444);
static char *NVreg_CoherentGPUMemoryMode = "";
module_param(NVreg_CoherentGPUMemoryMode, charp, 0444);

int kimi_nvidia_version(void)
{
	return 0;
}
EXPORT_SYMBOL(kimi_nvidia_version);

static int show_version(struct seq_file *out, void *unused)
{
	seq_puts(out, "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  " DRIVER_VERSION
		      "  Release Build  (kimi-runbook stand-in)\n");
	seq_puts(out, "GCC version:  gcc version " __VERSION__ "\n");
	return 0;
}

static int show_params(struct seq_file *out, void *unused)
{
	seq_printf(out, "GrdmaPciTopoCheckOverride: %d\n", NVreg_GrdmaPciTopoCheckOverride);
	seq_printf(out, "CreateImexChannel0: %d\n", NVreg_CreateImexChannel0);
	seq_printf(out, "CoherentGPUMemoryMode: \"%s\"\n", NVreg_CoherentGPUMemoryMode);
	return 0;
}

/* The owner is what counts: each open file is one reference on the module. */
static const struct file_operations gpu_operations = {
	.owner = THIS_MODULE,
};

static struct miscdevice gpu = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "nvidia0",
	.mode = 0666,
	.fops = &gpu_operations,
};

static int __init nvidia_init(void)
{
	struct proc_dir_entry *folder;
	int failed = misc_register(&gpu);

	if (failed)
		return failed;
	folder = proc_mkdir("driver/nvidia", NULL);
	if (!folder || !proc_create_single("version", 0444, folder, show_version) ||
	    !proc_create_single("params", 0444, folder, show_params)) {
		remove_proc_subtree("driver/nvidia", NULL);
		misc_deregister(&gpu);
		return -ENOMEM;
	}
	pr_info("NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  " DRIVER_VERSION "  (kimi-runbook stand-in)\n");
	return 0;
}

static void __exit nvidia_exit(void)
{
	remove_proc_subtree("driver/nvidia", NULL);
	misc_deregister(&gpu);
}

module_init(nvidia_init);
module_exit(nvidia_exit);
STANDIN("NVIDIA GPU driver");
