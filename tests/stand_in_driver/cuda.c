/* A stand-in for NVIDIA's driver on a machine without a GPU. It runs nothing: it keeps what the last launch would have
   read of its arguments, refuses to launch what is no longer loaded, and anything in a thread without a context, and
   answers Triton's other questions as an H200 would. */

#include "cuda.h"
#include <string.h>

enum { MOST_PARAMETERS = 1024, MOST_BYTES = 1 << 16, MOST_MODULES = 1 << 12 };

static int sizes[MOST_PARAMETERS], parameters;
static unsigned long long grid[9]; /* programs, threads of each, shared memory, stream, attributes */
static unsigned char bytes_read[MOST_BYTES];
static char is_loaded[MOST_MODULES], anything; /* of each module, which has one function; the handle of both points here */
static int modules;
static __thread CUcontext current;

/* The sizes of the parameters of the next kernel, which the real driver knows from its binary. */
void stand_in_expect(const int *of_parameters, int count) {
  memcpy(sizes, of_parameters, count * sizeof(int));
  parameters = count;
  memset(bytes_read, 0xff, MOST_BYTES);
  memset(grid, 0xff, sizeof(grid));
}

const unsigned char *stand_in_bytes_read(void) { return bytes_read; }
const unsigned long long *stand_in_grid(void) { return grid; }

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **more) {
  if (!current)
    return CUDA_ERROR_INVALID_CONTEXT;
  if (!*(char *)function)
    return CUDA_ERROR_INVALID_HANDLE;
  unsigned char *next = bytes_read;
  for (int i = 0; i < parameters; next += sizes[i++])
    memcpy(next, arguments[i], sizes[i]);
  unsigned long long found[] = {
      config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX, config->blockDimY, config->blockDimZ,
      config->sharedMemBytes, (unsigned long long)config->hStream, config->numAttrs};
  memcpy(grid, found, sizeof(grid));
  return CUDA_SUCCESS;
}

/* A descriptor holds what it was made of. */
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *shape, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill outside) {
  if (!current)
    return CUDA_ERROR_INVALID_CONTEXT;
  unsigned short *out = (unsigned short *)map;
  memset(map, 0, sizeof(*map));
  memcpy(out, &address, 8);
  memcpy(out + 4, strides, 8 * (rank - 1));
  memcpy(out + 20, shape, 8 * rank);
  for (unsigned i = 0; i < rank; i++)
    out[40 + i] = box[i];
  unsigned short rest[] = {type, rank, interleave, swizzle, promotion, outside};
  memcpy(out + 46, rest, sizeof(rest));
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 227 * 1024; break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
  default: *value = 0;
  }
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error == CUDA_ERROR_INVALID_HANDLE ? "invalid resource handle" : "no error of the stand-in";
  return CUDA_SUCCESS;
}

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { return *count = 1, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int index) { return *device = index, CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { return *device = 0, CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { return *context = current, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return current = context, CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return *value = 0, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  return *context = (CUcontext)&anything, CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  if (modules == MOST_MODULES)
    return CUDA_ERROR_OUT_OF_MEMORY;
  is_loaded[modules] = 1;
  return *module = (CUmodule)&is_loaded[modules++], CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule module) { return *(char *)module = 0, CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  return *function = (CUfunction)module, CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
  return *count = 1, CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
  return *(CUdeviceptr *)value = address, CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) { return *status = 0, CUDA_SUCCESS; }
