// SPDX-License-Identifier: GPL-2.0
/* Stand-in for nvidia_uvm: depends on nvidia, and has its device. */
#include <linux/fs.h>
#include <linux/miscdevice.h>

#include "standin.h"

static const struct file_operations uvm_operations = {
	.owner = THIS_MODULE,
};

static struct miscdevice uvm = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "nvidia-uvm",
	.mode = 0666,
	.fops = &uvm_operations,
};

static int __init uvm_init(void)
{
	return kimi_nvidia_version() ?: misc_register(&uvm);
}

static void __exit uvm_exit(void)
{
	misc_deregister(&uvm);
}

module_init(uvm_init);
module_exit(uvm_exit);
STANDIN("NVIDIA unified memory");
