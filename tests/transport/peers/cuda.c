/* A stub of libcuda.so.1 that logs its calls, to check signatures, structs and versions without a device. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <sys/mman.h>

typedef int Result;
typedef struct { int type, handle_types, location_type, location_id; void *win32; unsigned char compression, rdma;
                 unsigned short usage; unsigned char reserved[4]; } Prop;
typedef struct { int type, id, flags; } Access;
typedef union { int operation;
                struct { int operation; uint64_t address; uint64_t value; unsigned flags; uint64_t alias; } word;
                uint64_t pad[6]; } MemOp;

static char said[65536];
const char *stub_log(void) { return said; }
void stub_clear(void) { said[0] = 0; }
static int version = 13000, fails = 0;
void stub_version(int v) { version = v; }
void stub_fail(int code) { fails = code; }
#define LOG(...) snprintf(said + strlen(said), sizeof said - strlen(said), __VA_ARGS__)
#define FAIL if (fails) { int code = fails; fails = 0; return code; }

Result cuInit(unsigned flags) { return flags; }
Result cuDriverGetVersion(int *v) { *v = version; return 0; }
Result cuGetErrorName(int code, const char **s) { *s = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_X"; return 0; }
Result cuGetErrorString(int code, const char **s) { *s = "words"; return 0; }
Result cuDeviceGetUuid(unsigned char *u, int d) { memset(u, 7, 16); return 0; }
static Result get(int *d, int i) { *d = 10 + i; return 0; }
static Result attribute(int *v, int a, int d) { *v = a; LOG("attribute %d %d\n", a, d); return 0; }
static Result uuid(unsigned char *u, int d) { memset(u, d, 16); return 0; }
static Result granularity(size_t *g, const Prop *p, int option) { *g = 2u << 20; LOG("granularity %d %d %d %d %d\n", p->type, p->handle_types, p->location_type, p->location_id, option); return 0; }
static Result create(uint64_t *h, size_t n, const Prop *p, uint64_t f) { FAIL *h = 0x1122334455667788; LOG("create %zu %d %d %d %d %d %llu\n", n, p->type, p->handle_types, p->location_type, p->location_id, p->compression + p->rdma + p->usage + (p->win32 != 0), (unsigned long long)f); return 0; }
static Result release(uint64_t h) { LOG("release %llx\n", (unsigned long long)h); return 0; }
static Result reserve(uint64_t *a, size_t n, size_t align, uint64_t at, uint64_t f) { *a = 0x7f0000000000; LOG("reserve %zu %zu %llu %llu\n", n, align, (unsigned long long)at, (unsigned long long)f); return 0; }
static Result unreserve(uint64_t a, size_t n) { LOG("unreserve %llx %zu\n", (unsigned long long)a, n); return 0; }
static Result map(uint64_t a, size_t n, size_t o, uint64_t h, uint64_t f) { LOG("map %llx %zu %zu %llx %llu\n", (unsigned long long)a, n, o, (unsigned long long)h, (unsigned long long)f); return 0; }
static Result unmap(uint64_t a, size_t n) { LOG("unmap %llx %zu\n", (unsigned long long)a, n); return 0; }
static Result set_access(uint64_t a, size_t n, const Access *d, size_t c) { FAIL LOG("access %llx %zu %d %d %d %zu\n", (unsigned long long)a, n, d->type, d->id, d->flags, c); return 0; }
static Result export(void *fd, uint64_t h, int t, uint64_t f) { *(int *)fd = memfd_create("stub", 0); LOG("export %llx %d %llu\n", (unsigned long long)h, t, (unsigned long long)f); return 0; }
static Result import(uint64_t *h, void *fd, int t) { *h = 0xaabb; LOG("import %d %d\n", (int)(uintptr_t)fd, t); return 0; }
static Result host_register(void *p, size_t n, unsigned f) { LOG("register %zu %u\n", n, f); return 0; }
static Result host_unregister(void *p) { LOG("unregister\n"); return 0; }
static Result host_address(uint64_t *a, void *p, unsigned f) { *a = (uint64_t)p + 4096; LOG("address %u\n", f); return 0; }
static Result copy(uint64_t d, uint64_t s, size_t n, void *stream) { LOG("copy %llx %llx %zu %llx\n", (unsigned long long)d, (unsigned long long)s, n, (unsigned long long)(uintptr_t)stream); return 0; }
static Result batch(void *stream, unsigned n, const MemOp *ops, unsigned f) {
    LOG("batch %llx %u %u\n", (unsigned long long)(uintptr_t)stream, n, f);
    for (unsigned i = 0; i < n && i < 3; i++)
        LOG("op %d %llx %llx %u\n", ops[i].operation, (unsigned long long)ops[i].word.address, (unsigned long long)ops[i].word.value, ops[i].word.flags);
    return 0;
}

static const struct { const char *name; void *function; } table[] = {
    {"cuDeviceGet", get}, {"cuDeviceGetAttribute", attribute}, {"cuDeviceGetUuid", uuid},
    {"cuMemGetAllocationGranularity", granularity}, {"cuMemCreate", create}, {"cuMemRelease", release},
    {"cuMemAddressReserve", reserve}, {"cuMemAddressFree", unreserve}, {"cuMemMap", map}, {"cuMemUnmap", unmap},
    {"cuMemSetAccess", set_access}, {"cuMemExportToShareableHandle", export},
    {"cuMemImportFromShareableHandle", import}, {"cuMemHostRegister", host_register},
    {"cuMemHostUnregister", host_unregister}, {"cuMemHostGetDevicePointer", host_address},
    {"cuMemcpyDtoDAsync", copy}, {"cuStreamBatchMemOp", batch},
};

Result cuGetProcAddress_v2(const char *name, void **found, int wanted, uint64_t flags, int *status) {
    *found = 0;
    *status = 1;
    if (wanted != 12000 || flags != 1) return 1;
    for (unsigned i = 0; i < sizeof table / sizeof *table; i++)
        if (!strcmp(name, table[i].name)) { *found = table[i].function; *status = 0; }
    return 0;
}
