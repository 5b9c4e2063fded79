// SPDX-License-Identifier: GPL-2.0
/*
 * Stand-in for nvidia_peermem: a client of ib_core on top of nvidia. The real one registers with what only DOCA-OFED's
 * ib_core has (ib_register_peer_memory_client); this one uses the inbox interface, so that it loads and holds ib_core.
 */
#include <rdma/ib_verbs.h>

#include "standin.h"

static struct ib_client peer = {
	.name = "nvidia_peermem",
};

static int __init peermem_init(void)
{
	return kimi_nvidia_version() ?: ib_register_client(&peer);
}

static void __exit peermem_exit(void)
{
	ib_unregister_client(&peer);
}

module_init(peermem_init);
module_exit(peermem_exit);
STANDIN("NVIDIA peer memory for GPUDirect RDMA");
