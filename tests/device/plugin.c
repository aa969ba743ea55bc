// A backend for GGML_BACKEND_PATH: devices that stand in other processes, new ones for each process that loads this.
// SLOTCACHE_DEVICE_PORT: where run.py listens on this machine. It answers with the address of a server that it has started,
// and ends that server when the connection closes, so the connection stays open until the process ends.
// SLOTCACHE_DEVICES: how many there are (1 or 2).
#include <arpa/inet.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

struct ggml_backend_reg *ggml_backend_rpc_add_server(const char *address);

void ggml_backend_register(struct ggml_backend_reg *backend);

static struct ggml_backend_reg *borrow(void) {
    const char *port = getenv("SLOTCACHE_DEVICE_PORT");
    if (!port) return NULL;
    struct sockaddr_in place = {.sin_family = AF_INET, .sin_port = htons((unsigned short)atoi(port))};
    place.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int lent = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (lent < 0 || connect(lent, (struct sockaddr *)&place, sizeof place)) return NULL;
    char address[64];
    size_t length = 0;
    ssize_t got;
    while (length < sizeof address - 1 && (got = read(lent, address + length, 1)) == 1 && address[length] != '\n') length++;
    address[length] = 0;
    return length ? ggml_backend_rpc_add_server(address) : NULL;
}

struct ggml_backend_reg *ggml_backend_init(void) {
    const char *devices = getenv("SLOTCACHE_DEVICES");
    struct ggml_backend_reg *first = borrow(), *second = devices && atoi(devices) > 1 ? borrow() : NULL;
    if (second) ggml_backend_register(second);
    return first;
}
