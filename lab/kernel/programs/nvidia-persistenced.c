// SPDX-License-Identifier: GPL-2.0
/* Stand-in for nvidia-persistenced: keeps the GPU's device open until it is stopped, and tells systemd when it has it. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static void tell_systemd(const char *path)
{
	static const char ready[] = "READY=1";
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	int connection = socket(AF_UNIX, SOCK_DGRAM, 0);

	strncpy(address.sun_path, path, sizeof(address.sun_path) - 1);
	if (address.sun_path[0] == '@')
		address.sun_path[0] = '\0';
	if (sendto(connection, ready, strlen(ready), 0, (struct sockaddr *)&address, sizeof(sa_family_t) + strlen(path)) < 0)
		perror("nvidia-persistenced: telling systemd");
	close(connection);
}

int main(void)
{
	if (open("/dev/nvidia0", O_RDONLY) < 0) {
		perror("nvidia-persistenced (kimi-runbook stand-in): /dev/nvidia0");
		return 1;
	}
	if (getenv("NOTIFY_SOCKET"))
		tell_systemd(getenv("NOTIFY_SOCKET"));
	pause();
	return 0;
}
