/* A stub of libnccl.so.2 that needs no GPU: it checks the arguments of a binding and returns scripted answers.

   Guarantees: arguments are checked as NCCL checks them. Every call is logged before it acts. A handle that is used
   after its end is logged as FATAL and refused, never dereferenced. Sends and receives are accepted but copy nothing.
   Not covered: peers, streams, CUDA. Source of the rules: NCCL 2.28 init.cc, group.cc, enqueue.cc, argcheck.cc. */

#define _GNU_SOURCE
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef enum {
    Success, UnhandledCudaError, SystemError, InternalError, InvalidArgument, InvalidUsage, RemoteError, InProgress, Timeout
} Result;
typedef struct { char internal[128]; } UniqueId;
typedef struct {
    size_t size;
    unsigned int magic, version;
    int blocking, cgaClusterSize, minCTAs, maxCTAs;
    const char *netName;
    int splitShare, trafficClass;
    const char *commName;
    int collnetEnable, CTAPolicy, shrinkShare, nvlsCTAs, nChannelsPerNetPeer, nvlinkCentricSched;
} Config; /* the fields up to 2.28 */

typedef enum { Live, Finalized, Aborted, Destroyed } Life;
typedef struct { int rank, size, blocking, polls; Life life; Result async; } Comm;
typedef struct { char function[32]; int calls; Result status; } Script;

enum { MAX_COMMS = 256, MAX_OPERATIONS = 256, MAX_SCRIPTS = 32, MAX_HANDLES = 64, BLOCK_S = 5 };
static const char *const LIVES[] = {"", "finalize", "abort", "destroy"};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Comm comms[MAX_COMMS]; /* never reused, so that a dead handle is recognized */
static int comms_made, ids_made, version = 22809, polls;
static Script scripts[MAX_SCRIPTS];
static void *allocations[MAX_HANDLES], *registrations[MAX_HANDLES];
static char calls[1 << 18], last_error[256], blocked[32];
static size_t calls_bytes;
static int is_inside;
static FILE *mirror;
static __thread int depth;
static __thread Comm *operations[MAX_OPERATIONS]; /* the communicators of the transfers of an open group */
static __thread int operations_made;

static void full(const char *what) {
    fprintf(stderr, "the NCCL stub has no room for more %s\n", what);
    abort();
}

/* --- controls for tests ------------------------------------------------------------------------------------------ */

size_t stub_log(char *text, size_t size) {
    pthread_mutex_lock(&lock);
    if (text && size) snprintf(text, size, "%s", calls);
    size_t needed = calls_bytes + 1;
    pthread_mutex_unlock(&lock);
    return needed;
}
void stub_clear(void) { calls[calls_bytes = 0] = 0, last_error[0] = 0; }
void stub_log_to(const char *path) { setvbuf(mirror = fopen(path, "a"), NULL, _IONBF, 0); } /* outlives the process */
void stub_set_version(int value) { version = value; }
void stub_set_polls(int count) { polls = count; } /* IN_PROGRESS answers after an init, finalize, group end */
void stub_set_async(Comm *comm, Result status) { comm->async = status; }
void stub_answer(const char *function, int nth, Result status) { /* the nth call from now on */
    for (Script *s = scripts; s < scripts + MAX_SCRIPTS; s++)
        if (!s->calls) {
            snprintf(s->function, sizeof s->function, "%s", function);
            s->calls = nth, s->status = status;
            return;
        }
    full("scripted answers");
}
void stub_block(const char *function) { snprintf(blocked, sizeof blocked, "%s", function); } /* its next call waits */
int stub_inside(void) { return is_inside; }
void stub_release(void) {
    pthread_mutex_lock(&lock);
    is_inside = 0;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* --- logging and answering --------------------------------------------------------------------------------------- */

static void note(const char *format, va_list values) {
    size_t room = sizeof calls - calls_bytes;
    int length = vsnprintf(calls + calls_bytes, room, format, values);
    if (length < 0 || (size_t)length + 2 > room) full("log: call stub_clear");
    memcpy(calls + calls_bytes + length, "\n", 2);
    if (mirror) fputs(calls + calls_bytes, mirror);
    calls_bytes += (size_t)length + 1;
}
__attribute__((format(printf, 2, 3))) static Result fail(Result status, const char *format, ...) {
    va_list values;
    pthread_mutex_lock(&lock);
    va_start(values, format);
    vsnprintf(last_error, sizeof last_error, format, values);
    va_end(values);
    if (!strncmp(format, "FATAL", 5)) {
        va_start(values, format);
        note(format, values);
        va_end(values);
    }
    pthread_mutex_unlock(&lock);
    return status;
}
/* Log a call (its name is the first value), wait if `stub_block` names it, return the scripted status or Success. */
__attribute__((format(printf, 1, 2))) static Result enter(const char *format, ...) {
    va_list values;
    Result status = Success;
    pthread_mutex_lock(&lock);
    va_start(values, format);
    note(format, values);
    va_end(values);
    va_start(values, format);
    const char *function = va_arg(values, const char *);
    va_end(values);
    for (Script *s = scripts; s < scripts + MAX_SCRIPTS; s++)
        if (s->calls && !strcmp(s->function, function) && !--s->calls) status = s->status;
    if (!strcmp(blocked, function)) {
        struct timespec end;
        clock_gettime(CLOCK_REALTIME, &end);
        end.tv_sec += BLOCK_S;
        blocked[0] = 0;
        is_inside = 1;
        while (is_inside && status != Timeout)
            if (pthread_cond_timedwait(&changed, &lock, &end)) status = Timeout;
        is_inside = 0;
    }
    pthread_mutex_unlock(&lock);
    return status == Success || status == InProgress ? status : fail(status, "scripted end of %s", function);
}
static Result living(const char *function, Comm *comm) {
    if (!comm) return fail(InvalidArgument, "%s : comm argument is NULL", function);
    if (comm < comms || comm >= comms + comms_made) return fail(InvalidArgument, "FATAL %s of no communicator", function);
    if (comm->life > Finalized) return fail(InvalidArgument, "FATAL %s after %s", function, LIVES[comm->life]);
    return Success;
}
static Result ready(const char *function, Comm *comm) {
    Result status = living(function, comm);
    if (!status && comm->life == Finalized) return fail(InvalidArgument, "FATAL %s after finalize", function);
    if (!status && comm->polls)
        return fail(InvalidArgument, "Attempt to use communicator before the previous operation returned ncclSuccess");
    return status;
}
static Result launch(Comm *comm) { return !comm->blocking && (comm->polls = polls) ? InProgress : Success; }
static Result find(void **slots, void *from, void *to) { /* replace one entry; NULL is a free one */
    for (int i = 0; i < MAX_HANDLES; i++)
        if (slots[i] == from) return slots[i] = to, Success;
    return fail(InvalidUsage, "could not find handle %p", from);
}
static Result make(Comm **comm, int size, int rank, const Config *config) {
    *comm = NULL;
    if (config && config->magic != 0xcafebeef) return fail(InvalidArgument, "config magic is %x", config->magic);
    if (config && (config->size < sizeof(Config) || config->size > 4096 || config->version > 30000))
        return fail(InvalidArgument, "config size %zu, version %u", config->size, config->version);
    int blocking = !config || config->blocking == INT_MIN ? 1 : config->blocking;
    if (blocking != 0 && blocking != 1) return fail(InvalidArgument, "config blocking is %d", blocking);
    if (config && config->maxCTAs != INT_MIN && config->maxCTAs < 1) return fail(InvalidArgument, "config maxCTAs");
    if (size < 1 || rank < 0 || rank >= size) return fail(InvalidArgument, "invalid rank %d of %d", rank, size);
    pthread_mutex_lock(&lock);
    if (comms_made == MAX_COMMS) full("communicators");
    *comm = &comms[comms_made++];
    pthread_mutex_unlock(&lock);
    **comm = (Comm){.rank = rank, .size = size, .blocking = blocking};
    return launch(*comm);
}
#define CONFIG_FORMAT "size=%zu version=%u blocking=%d cga=%d minCTAs=%d maxCTAs=%d netName=%s commName=%s net=%d sched=%d"
#define CONFIG_VALUES(c)                                                                                                \
    (c) ? (c)->size : 0, (c) ? (c)->version : 0, (c) ? (c)->blocking : INT_MIN,                                         \
        (c) ? (c)->cgaClusterSize : INT_MIN, (c) ? (c)->minCTAs : INT_MIN, (c) ? (c)->maxCTAs : INT_MIN,                \
        (c) && (c)->netName ? (c)->netName : "-", (c) && (c)->commName ? (c)->commName : "-",                           \
        (c) ? (c)->nChannelsPerNetPeer : INT_MIN, (c) ? (c)->nvlinkCentricSched : INT_MIN

/* --- NCCL: version, errors and the life of a communicator -------------------------------------------------------- */

Result ncclGetVersion(int *value) { return *value = version, Success; }
const char *ncclGetErrorString(Result status) { return status == Success ? "no error" : "an error of the stub"; }
Result ncclGetUniqueId(UniqueId *id) {
    Result status = enter("%s", __func__);
    for (int i = 0; i < 128; i++) id->internal[i] = (char)(i * 37 + ids_made); /* holds a 0 and bytes above 127 */
    ids_made++;
    return status;
}
Result ncclCommInitRankConfig(Comm **comm, int size, UniqueId id, int rank, Config *config) {
    char hex[257];
    for (int i = 0; i < 128; i++) snprintf(hex + 2 * i, 3, "%02x", (unsigned char)id.internal[i]);
    Result status = enter("%s %d %s %d " CONFIG_FORMAT, __func__, size, hex, rank, CONFIG_VALUES(config));
    if (!status || status == InProgress) {
        Result made = make(comm, size, rank, config);
        status = made ? made : status;
    }
    if (status && status != InProgress) depth++; /* as the real one does */
    return status;
}
Result ncclCommGetAsyncError(Comm *comm, Result *status) {
    Result result = enter("%s %p", __func__, (void *)comm);
    if (result || (result = living(__func__, comm))) return result;
    *status = comm->polls ? (comm->polls--, InProgress) : comm->async;
    return Success;
}
static Result end(const char *function, Comm *comm, Life life) {
    Result status = enter("%s %p", function, (void *)comm);
    if (!comm || status || (status = living(function, comm))) return status;
    comm->life = life;
    return life == Finalized ? launch(comm) : Success;
}
Result ncclCommDestroy(Comm *comm) { return end(__func__, comm, Destroyed); }
Result ncclCommAbort(Comm *comm) { return end(__func__, comm, Aborted); }
Result ncclCommCount(Comm *comm, int *count) { return comm ? *count = comm->size, Success : InvalidArgument; }
Result ncclCommUserRank(Comm *comm, int *rank) { return comm ? *rank = comm->rank, Success : InvalidArgument; }
Result ncclCommCuDevice(Comm *comm, int *device) { return comm ? *device = 0, Success : InvalidArgument; }
#ifndef WITHOUT_FINALIZE
Result ncclCommFinalize(Comm *comm) {
    Result status = comm ? ready(__func__, comm) : Success;
    return status ? status : end(__func__, comm, Finalized);
}
#endif
Result ncclCommSplit(void) { return enter("%s", __func__), InternalError; } /* cupy looks it up, but no test calls it */
#ifndef WITHOUT_LAST_ERROR
const char *ncclGetLastError(Comm *comm) { return comm && living(__func__, comm) ? "dead" : last_error; }
#endif

/* --- NCCL: memory ------------------------------------------------------------------------------------------------ */

#ifndef WITHOUT_MEM_ALLOC
Result ncclMemAlloc(void **pointer, size_t size) {
    Result status = enter("%s %zu", __func__, size);
    return status ? status : find(allocations, NULL, *pointer = malloc(size));
}
Result ncclMemFree(void *pointer) {
    Result status = enter("%s %p", __func__, pointer);
    if (!pointer || status || (status = find(allocations, pointer, NULL))) return status;
    return free(pointer), Success;
}
#endif
#ifndef WITHOUT_REGISTER
Result ncclCommRegister(Comm *comm, void *buffer, size_t size, void **handle) {
    Result status = enter("%s %p %p %zu", __func__, (void *)comm, buffer, size);
    if (status || (status = ready(__func__, comm))) return status;
    return find(registrations, NULL, *handle = (void *)((uintptr_t)buffer ^ 1));
}
Result ncclCommDeregister(Comm *comm, void *handle) {
    Result status = enter("%s %p %p", __func__, (void *)comm, handle);
    if (status || (status = ready(__func__, comm)) || !handle) return status;
    return find(registrations, handle, NULL);
}
#endif

/* --- NCCL: groups and transfers ---------------------------------------------------------------------------------- */

static Result run(void) {
    Result status = Success;
    for (int i = 0; i < operations_made; i++)
        if (launch(operations[i])) status = InProgress;
    operations_made = 0;
    return status;
}
Result ncclGroupStart(void) {
    Result status = enter("%s", __func__);
    depth += !status;
    return status;
}
Result ncclGroupEnd(void) {
    Result status = enter("%s", __func__);
    if (!depth) return fail(InvalidUsage, "ncclGroupEnd: not in a group call.");
    if (--depth) return status;
    if (status) operations_made = 0;
    return status ? status : run();
}
static Result queue(const char *function, void *buffer, size_t count, int type, int peer, Comm *comm,
                    void *stream) {
    Result status = enter("%s %p %zu %d %d %p %p", function, buffer, count, type, peer, (void *)comm, stream);
    if (status || (status = ready(function, comm))) return status;
    if (type < 0 || type > 11) return fail(InvalidArgument, "%s : invalid type %d", function, type);
    if (peer < 0 || peer >= comm->size) return fail(InvalidArgument, "%s : invalid peer %d", function, peer);
    if (!buffer && count) return fail(InvalidArgument, "%s : buffer argument is NULL", function);
    if (operations_made == MAX_OPERATIONS) full("transfers of a group");
    operations[operations_made++] = comm;
    return depth ? Success : run();
}
Result ncclSend(void *buffer, size_t count, int type, int peer, Comm *comm, void *stream) {
    return queue(__func__, buffer, count, type, peer, comm, stream);
}
Result ncclRecv(void *buffer, size_t count, int type, int peer, Comm *comm, void *stream) {
    return queue(__func__, buffer, count, type, peer, comm, stream);
}

/* --- NCCL: functions that cupy needs to load, and the runtime never calls ---------------------------------------- */

#define NEVER(name)                                                                                                     \
    Result name(void) { return fail(InvalidUsage, "FATAL %s", __func__); }
NEVER(ncclAllGather)
NEVER(ncclAllReduce)
NEVER(ncclBcast)
NEVER(ncclBroadcast)
NEVER(ncclReduce)
NEVER(ncclReduceScatter)
NEVER(ncclCommInitAll)
