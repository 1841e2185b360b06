/* A stub of libcuda.so.1 for Triton's launcher. It loads any binary, and records launches with the bytes of parameters. */
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include "cuda.h"

#define MOST 4096
#define BYTES 1024
typedef struct {
    unsigned grid[3], block[3], shared, attributes, cluster;
    uint64_t stream, function, thread, bytes;
    unsigned char parameters[BYTES];
} Launch;

static Launch launches[MOST];
static unsigned count, sizes[256], size_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* For the test: the sizes of the parameters of the kernel that will be launched, and the recorded launches. */
void stub_sizes(unsigned n, const unsigned *given) { memcpy(sizes, given, n * sizeof *given); size_count = n; count = 0; }
unsigned stub_launches(const Launch **first) { *first = launches; return count; }

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    pthread_mutex_lock(&lock);
    Launch *launch = &launches[count++ % MOST];
    memset(launch, 0, sizeof *launch);
    unsigned grid[3] = {config->gridDimX, config->gridDimY, config->gridDimZ};
    unsigned block[3] = {config->blockDimX, config->blockDimY, config->blockDimZ};
    memcpy(launch->grid, grid, sizeof grid);
    memcpy(launch->block, block, sizeof block);
    launch->shared = config->sharedMemBytes;
    launch->stream = (uint64_t)(uintptr_t)config->hStream;
    launch->function = (uint64_t)(uintptr_t)function;
    launch->thread = (uint64_t)pthread_self();
    launch->attributes = config->numAttrs;
    for (unsigned i = 0; i < config->numAttrs; i++)
        if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) launch->cluster = config->attrs[i].value.clusterDim.x;
    for (unsigned i = 0; i < size_count && launch->bytes + sizes[i] <= BYTES; launch->bytes += sizes[i++])
        memcpy(launch->parameters + launch->bytes, parameters[i], sizes[i]);
    pthread_mutex_unlock(&lock);
    return extra ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) { *module = (CUmodule)image; return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    static uintptr_t next = 0x1000;
    *function = (CUfunction)(next += 16);
    return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 168 : attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int number) { *device = number; return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    *value = attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT ? 132
           : attribute == CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK ? 65536 : 232448;
    return CUDA_SUCCESS;
}
/* The tensors of the test are on the host, so a pointer is its own device pointer. */
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    *(CUdeviceptr *)value = pointer;
    return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) { *status = CU_STREAM_CAPTURE_STATUS_NONE; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult code, const char **text) { *text = "an error of the stub"; return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) { *clusters = 1; return CUDA_SUCCESS; }
