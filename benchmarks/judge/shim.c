/* A CUDA runtime, a driver and NVML without a card: memory is addresses that nothing stands behind, kernels are not started.
 *
 * Loaded before PyTorch's own libraries it answers their calls, so that PyTorch's compiled host code (dispatcher, autocast, choice
 * of attention kernels, caching allocator, autograd's device thread) runs as on the card that `judge_card` describes. What it does
 * not have, `libcudart.so` would have to answer; that asks the driver, and there is none.
 *
 * What depends on values is not as on a card: reading device memory gives zeros, and true for a flag.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include "driver_types.h"

#define API __attribute__((visibility("default")))
#define DOES_NOTHING(name, ...) API int name(__VA_ARGS__) { return 0; }

/* The card: compute capability, multiprocessors, resident threads of each, shared memory that a block may ask for. */

static int major = 9, minor = 0, processors = 132, threads = 2048, shared_memory = 232448;

API void judge_card(int major_, int minor_, int processors_, int threads_, int shared_memory_) {
    major = major_, minor = minor_, processors = processors_, threads = threads_, shared_memory = shared_memory_;
}

#define TOTAL (192ull << 30) /* more than any plan here needs: nothing is ever refused */

API int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
API int cudaGetDevice(int *device) { *device = 0; return 0; }
API int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
API int cudaRuntimeGetVersion(int *version) { *version = 13000; return 0; }

API int cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "none");
    p->major = major, p->minor = minor, p->multiProcessorCount = processors, p->warpSize = 32;
    p->maxThreadsPerMultiProcessor = threads, p->maxThreadsPerBlock = 1024, p->regsPerBlock = 65536;
    p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = shared_memory;
    p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = 65535, p->totalGlobalMem = TOTAL;
    return 0;
}
API int cudaGetDeviceProperties_v2(struct cudaDeviceProp *p, int device) { return cudaGetDeviceProperties(p, device); }

API int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = minor; break;
    case cudaDevAttrMultiProcessorCount: *value = processors; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = threads; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = shared_memory; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY: *value = 65535; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    default: *value = 0;
    }
    return 0;
}
API int cudaDeviceCanAccessPeer(int *can, int one, int other) { *can = 1; return 0; }
API int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0, *greatest = -5; return 0; }
API int cudaDeviceGetLimit(size_t *value, int limit) { *value = 1024; return 0; }
API int cudaGetDeviceFlags(unsigned *flags) { *flags = 0; return 0; }
DOES_NOTHING(cudaSetDevice, int device)
DOES_NOTHING(cudaSetDeviceFlags, unsigned flags)
DOES_NOTHING(cudaDeviceSynchronize, void)
DOES_NOTHING(cudaDeviceSetLimit, int limit, size_t value)
DOES_NOTHING(cudaDeviceEnablePeerAccess, int device, unsigned flags)

/* Errors: there are none. */

DOES_NOTHING(cudaGetLastError, void)
DOES_NOTHING(cudaPeekAtLastError, void)
API const char *cudaGetErrorString(int error) { return "an error of the judge"; }
API const char *cudaGetErrorName(int error) { return "judge"; }

/* Memory: each segment at higher addresses than those before. */

static unsigned long long next_address = 0x400000000000ull;

API int cudaMalloc(void **pointer, size_t size) {
    *pointer = (void *)next_address;
    next_address += ((size + 0x1fffff) & ~0x1fffffull) + 0x200000;
    return 0;
}
API int cudaMallocAsync(void **pointer, size_t size, void *stream) { return cudaMalloc(pointer, size); }
API int cudaMemGetInfo(size_t *available, size_t *total) { *available = *total = TOTAL; return 0; }
API int cudaHostAlloc(void **pointer, size_t size, unsigned flags) { *pointer = malloc(size); return 0; }
API int cudaFreeHost(void *pointer) { free(pointer); return 0; }
API int cudaHostGetDevicePointer(void **pointer, void *host, unsigned flags) { *pointer = host; return 0; }
API int cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *pointer) { memset(a, 0, sizeof *a); return 0; }
API int cudaGetSymbolAddress(void **pointer, const void *symbol) { *pointer = (void *)0x600000000000ull; return 0; }
API int cudaDeviceGetDefaultMemPool(void **pool, int device) { *pool = (void *)1; return 0; }
DOES_NOTHING(cudaFree, void *pointer)
DOES_NOTHING(cudaFreeAsync, void *pointer, void *stream)
DOES_NOTHING(cudaHostRegister, void *pointer, size_t size, unsigned flags)
DOES_NOTHING(cudaHostUnregister, void *pointer)
DOES_NOTHING(cudaMemset, void *pointer, int value, size_t size)
DOES_NOTHING(cudaMemsetAsync, void *pointer, int value, size_t size, void *stream)
DOES_NOTHING(cudaMemPrefetchAsync, void *pointer)
DOES_NOTHING(cudaMemcpyToSymbol, void *symbol, void *source, size_t size, size_t offset, int kind)
DOES_NOTHING(cudaIpcGetMemHandle, void *handle, void *pointer)

/* What is read from the device are zeros, but a flag is true: random numbers repeat, losses are finite, masks hide nothing. */
API int cudaMemcpy(void *to, const void *from, size_t size, int kind) {
    if (kind == cudaMemcpyDeviceToHost) memset(to, size == 1, size);
    return 0;
}
API int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) { return cudaMemcpy(to, from, size, kind); }
API int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t pitch, size_t width, size_t height, int kind, void *stream) {
    for (size_t row = 0; row < height && kind == cudaMemcpyDeviceToHost; row++) memset((char *)to + row * to_pitch, 0, width);
    return 0;
}

/* Streams and events: all that was asked for has happened. */

API int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    static long number = 0x1000;
    *stream = (void *)(number += 0x10);
    return 0;
}
API int cudaStreamCreateWithFlags(void **stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
API int cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
API int cudaStreamGetCaptureInfo(void *stream, int *status, void *a, void *b, void *c, void *d, void *e) { *status = 0; return 0; }
API int cudaStreamGetPriority(void *stream, int *priority) { *priority = 0; return 0; }
API int cudaStreamGetDevice(void *stream, int *device) { *device = 0; return 0; }
API int cudaEventCreate(void **event) { *event = (void *)0x77; return 0; }
API int cudaEventCreateWithFlags(void **event, unsigned flags) { return cudaEventCreate(event); }
API int cudaEventElapsedTime(float *time, void *start, void *end) { *time = 0; return 0; }
DOES_NOTHING(cudaStreamDestroy, void *stream)
DOES_NOTHING(cudaStreamSynchronize, void *stream)
DOES_NOTHING(cudaStreamQuery, void *stream)
DOES_NOTHING(cudaStreamWaitEvent, void *stream, void *event, unsigned flags)
DOES_NOTHING(cudaThreadExchangeStreamCaptureMode, int *mode)
DOES_NOTHING(cudaEventRecord, void *event, void *stream)
DOES_NOTHING(cudaEventRecordWithFlags, void *event, void *stream, unsigned flags)
DOES_NOTHING(cudaEventQuery, void *event)
DOES_NOTHING(cudaEventSynchronize, void *event)
DOES_NOTHING(cudaEventDestroy, void *event)

/* Kernels: none is started. Occupancy decides over scratch of cub's scans and sorts; two blocks are an assumption. */

API int cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *function) {
    static const int compiled_for[] = {75, 80, 86, 90, 100, 120}; /* the wheels of torch for CUDA 13; 8.9 runs the code for 8.6 */
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024, a->numRegs = 64;
    for (int i = 0; i < 6 && compiled_for[i] <= major * 10 + minor; i++) a->binaryVersion = a->ptxVersion = compiled_for[i];
    return 0;
}
API int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads_, size_t size) { *blocks = 2; return 0; }
API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads_, size_t size, unsigned flags) {
    *blocks = 2;
    return 0;
}
API int cudaGetFuncBySymbol(void **function, const void *symbol) { *function = (void *)1; return 0; }
API int __cudaGetKernel(void **kernel, const void *symbol) { *kernel = (void *)1; return 0; }
API int __cudaPushCallConfiguration(struct dim3 grid, struct dim3 block, size_t size, void *stream) { return 0; }
API int __cudaPopCallConfiguration(struct dim3 *grid, struct dim3 *block, size_t *size, void **stream) {
    memset(grid, 0, sizeof *grid), memset(block, 0, sizeof *block), *size = 0, *stream = 0;
    return 0;
}
DOES_NOTHING(cudaFuncSetAttribute, const void *function, int attribute, int value)
DOES_NOTHING(cudaKernelSetAttributeForDevice, void *kernel, int attribute, int value, int device)
DOES_NOTHING(cudaLaunchKernel, const void *function, void *grid, void *block, void **arguments, size_t size, void *stream)
DOES_NOTHING(__cudaLaunchKernel, void *kernel, void *grid, void *block, void **arguments, size_t size, void *stream)
DOES_NOTHING(cudaLaunchKernelExC, const void *configuration, const void *function, void **arguments)

/* The driver and NVML, which are loaded by name: whatever else is asked for does nothing. */

API int cuDeviceGetCount(int *count) { *count = 1; return 0; }
API int cuDeviceGet(int *device, int index) { *device = index; return 0; }
API int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0, *active = 1; return 0; }
API int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
API int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
API int cuDeviceGetAttribute(int *value, int attribute, int device) { return cudaDeviceGetAttribute(value, attribute, device); }
API int cuGetErrorString(int error, const char **text) { *text = "an error of the judge"; return 0; }
API int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
DOES_NOTHING(cuInit, unsigned flags)
DOES_NOTHING(nvmlInit_v2, void)

static int nothing(void) { return 0; }
static int entry_point(const char *name, void **function, int version, unsigned long long flags, int *result);

static void *found(const char *name) {
    if (!strcmp(name, "cuGetProcAddress")) return (void *)entry_point;
    void *own = dlsym(RTLD_DEFAULT, name);
    return own ? own : (void *)nothing;
}
static int entry_point(const char *name, void **function, int version, unsigned long long flags, int *result) {
    *function = found(name);
    if (result) *result = 0;
    return 0;
}
API int cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *result) {
    return entry_point(name, function, 0, flags, result);
}
API int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags, int *result) {
    return entry_point(name, function, version, flags, result);
}
