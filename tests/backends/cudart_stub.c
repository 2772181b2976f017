/* The CUDA runtime and driver of a machine without a GPU, as far as backends/cuda_calls.py calls them.

   Device memory is a file that processes map, so that handles work between them; streams do at once what is queued.
   One library stands for both, so that they have the same memory. Environment:
     STUB_CUDA_FOLDER   where device memory lies; /dev/shm
     STUB_CUDA_DEVICES  how many devices there are; 1
     STUB_CUDA_MEMORY   bytes that each has; 1 GiB
     STUB_CUDA_FAIL     calls that fail, each with its status: "cudaMalloc:2,cudaMemcpy:700" */

#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, INVALID = 1, NO_MEMORY = 2, BAD_DEVICE = 101, MADE_HERE = 201, ALREADY_MAPPED = 208, BAD_HANDLE = 400 };
enum { MOST = 4096, NAME = 64 };

typedef struct { char reserved[64]; } Handle;
typedef struct { char name[NAME]; char *at; size_t size; int device, mapped; } Allocation;
typedef struct { long long told_ns; } Event;

static Allocation allocations[MOST];
static void *registered[MOST];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int current, last;
static long long made;

static const char *told(const char *name, const char *otherwise) {
    const char *found = getenv(name);
    return found && *found ? found : otherwise;
}

static int devices(void) { return atoi(told("STUB_CUDA_DEVICES", "1")); }
static size_t total(void) { return strtoull(told("STUB_CUDA_MEMORY", "1073741824"), NULL, 10); }

static int status_of(const char *call) {
    size_t length = strlen(call);
    for (const char *at = told("STUB_CUDA_FAIL", ""); *at; at += strcspn(at, ","), at += *at == ',')
        if (!strncmp(at, call, length) && at[length] == ':') return atoi(at + length + 1);
    return OK;
}

static int end(int status) {
    if (status) last = status;
    return status;
}

#define BEGIN                                             \
    do {                                                  \
        int refused = status_of(__func__);                \
        if (refused) return end(refused);                 \
    } while (0)

/* The allocation that holds these bytes; call with the lock held. */
static Allocation *found(const void *pointer, size_t size) {
    const char *at = pointer;
    for (Allocation *each = allocations; each < allocations + MOST; each++)
        if (each->at && at >= each->at && at + size <= each->at + each->size) return each;
    return NULL;
}

static Allocation *unused(void) {
    for (Allocation *each = allocations; each < allocations + MOST; each++)
        if (!each->at) return each;
    return NULL;
}

static void path_of(const char *name, char *path, size_t size) {
    snprintf(path, size, "%s/%s", told("STUB_CUDA_FOLDER", "/dev/shm"), name);
}

static size_t used(int device) {
    size_t sum = 0;
    for (Allocation *each = allocations; each < allocations + MOST; each++)
        if (each->at && !each->mapped && each->device == device) sum += each->size;
    return sum;
}

static int map(Allocation *into, const char *name, size_t size, int flags) {
    char path[512];
    path_of(name, path, sizeof path);
    int file = open(path, O_RDWR | O_CLOEXEC | flags, 0600);
    if (file < 0) return INVALID;
    if (flags && ftruncate(file, (off_t)size)) { close(file); return NO_MEMORY; }
    void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (at == MAP_FAILED) return NO_MEMORY;
    snprintf(into->name, NAME, "%s", name);
    into->at = at;
    into->size = size;
    into->device = current;
    into->mapped = !flags;
    return OK;
}

static void unmap(Allocation *each) {
    char path[512];
    munmap(each->at, each->size);
    path_of(each->name, path, sizeof path);
    if (!each->mapped) unlink(path);
    each->at = NULL;
}

__attribute__((destructor)) static void leave(void) {
    char prefix[NAME];
    snprintf(prefix, NAME, "cudart_stub_%d_", (int)getpid());
    for (Allocation *each = allocations; each < allocations + MOST; each++)
        if (each->at && !strncmp(each->name, prefix, strlen(prefix))) unmap(each);
}

/* devices */

int cudaGetDeviceCount(int *count) { BEGIN; *count = devices(); return end(*count ? OK : 100); }
int cudaSetDevice(int device) {
    BEGIN;
    if (device < 0 || device >= devices()) return end(BAD_DEVICE);
    current = device;
    return OK;
}
int cudaDeviceGetPCIBusId(char *text, int size, int device) {
    BEGIN;
    if (device < 0 || device >= devices()) return end(BAD_DEVICE);
    snprintf(text, (size_t)size, "0000:%02x:00.0", 0x65 + device);
    return OK;
}
int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    BEGIN;
    if (device < 0 || device >= devices()) return end(BAD_DEVICE);
    *value = attribute == 75 ? 9 : attribute == 41;
    return OK;
}
int cudaMemGetInfo(size_t *free_bytes, size_t *all) {
    BEGIN;
    pthread_mutex_lock(&lock);
    *all = total();
    *free_bytes = *all - used(current);
    pthread_mutex_unlock(&lock);
    return OK;
}
int cuInit(unsigned flags) { BEGIN; return OK; }
int cuDeviceGet(int *device, int number) { BEGIN; *device = number; return number < devices() ? OK : BAD_DEVICE; }
int cuDeviceGetName(char *text, int size, int device) { BEGIN; snprintf(text, (size_t)size, "Stub GPU"); return OK; }

/* memory */

int cudaMalloc(void **pointer, size_t size) {
    char name[NAME];
    BEGIN;
    pthread_mutex_lock(&lock);
    int status = NO_MEMORY;
    Allocation *each = unused();
    if (each && size && size <= total() - used(current)) {
        snprintf(name, NAME, "cudart_stub_%d_%lld", (int)getpid(), ++made);
        status = map(each, name, size, O_CREAT | O_EXCL);
        *pointer = each->at;
    }
    pthread_mutex_unlock(&lock);
    return end(status);
}
int cudaFree(void *pointer) {
    BEGIN;
    if (!pointer) return OK;
    pthread_mutex_lock(&lock);
    Allocation *each = found(pointer, 1);
    int status = each && each->at == pointer && !each->mapped ? OK : INVALID;
    if (!status) unmap(each);
    pthread_mutex_unlock(&lock);
    return end(status);
}
int cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
    BEGIN;
    return end(posix_memalign(pointer, 4096, size ? size : 1) ? NO_MEMORY : OK);
}
int cudaFreeHost(void *pointer) { BEGIN; free(pointer); return OK; }
/* As CUDA, an error where a page is not there, and where it is registered already. */
int cudaHostRegister(void *pointer, size_t size, unsigned flags) {
    BEGIN;
    if (!pointer || !size || flags & ~1u) return end(INVALID);
    for (size_t at = 0; at < size; at += 4096) {
        char byte;
        struct iovec into = {&byte, 1}, of = {(char *)pointer + at, 1};
        if (process_vm_readv(getpid(), &into, 1, &of, 1, 0) != 1) return end(INVALID);
    }
    pthread_mutex_lock(&lock);
    int status = OK;
    void **room = NULL;
    for (void **each = registered; each < registered + MOST; each++) {
        if (*each == pointer) status = 712;
        if (!*each) room = each;
    }
    if (!status && room) *room = pointer;
    pthread_mutex_unlock(&lock);
    return end(status);
}
int cudaHostUnregister(void *pointer) {
    BEGIN;
    pthread_mutex_lock(&lock);
    int status = 713;
    for (void **each = registered; pointer && each < registered + MOST; each++)
        if (*each == pointer) { *each = NULL; status = OK; }
    pthread_mutex_unlock(&lock);
    return end(status);
}
static int copied(void *to, const void *from, size_t size, int kind) {
    pthread_mutex_lock(&lock);
    int status = kind != 1 && kind != 2 && kind != 4 ? 21 : OK;
    if ((kind == 1 && !found(to, size)) || (kind == 2 && !found(from, size))) status = INVALID;
    pthread_mutex_unlock(&lock);
    if (!status) memmove(to, from, size);
    return status;
}
int cudaMemcpy(void *to, const void *from, size_t size, int kind) { BEGIN; return end(copied(to, from, size, kind)); }
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
    BEGIN;
    return end(stream ? copied(to, from, size, kind) : BAD_HANDLE);
}
int cuMemGetAddressRange_v2(unsigned long long *base, size_t *size, unsigned long long pointer) {
    BEGIN;
    pthread_mutex_lock(&lock);
    Allocation *each = found((void *)(size_t)pointer, 1);
    if (each) { *base = (unsigned long long)(size_t)each->at; *size = each->size; }
    pthread_mutex_unlock(&lock);
    return each ? OK : INVALID;
}

/* memory of other processes */

int cudaIpcGetMemHandle(Handle *handle, void *pointer) {
    BEGIN;
    pthread_mutex_lock(&lock);
    Allocation *each = found(pointer, 1);
    int status = each && !each->mapped ? OK : INVALID;
    if (!status) {
        memset(handle, 0, sizeof *handle);
        snprintf(handle->reserved, sizeof handle->reserved, "%s %zu", each->name, each->size);
    }
    pthread_mutex_unlock(&lock);
    return end(status);
}
/* As older drivers, it refuses what this process has mapped already; and what it has made, as all of them. */
int cudaIpcOpenMemHandle(void **pointer, Handle handle, unsigned flags) {
    char name[NAME];
    int maker;
    size_t size;
    BEGIN;
    handle.reserved[63] = 0;
    if (flags != 1 || sscanf(handle.reserved, "%63s %zu", name, &size) != 2) return end(INVALID);
    if (sscanf(name, "cudart_stub_%d_", &maker) != 1) return end(INVALID);
    if (maker == (int)getpid()) return end(MADE_HERE);
    pthread_mutex_lock(&lock);
    int status = OK;
    for (Allocation *each = allocations; each < allocations + MOST; each++)
        if (each->at && !strcmp(each->name, name)) status = ALREADY_MAPPED;
    Allocation *each = unused();
    if (!status) status = each ? map(each, name, size, 0) : NO_MEMORY;
    if (!status) *pointer = each->at;
    pthread_mutex_unlock(&lock);
    return end(status);
}
int cudaIpcCloseMemHandle(void *pointer) {
    BEGIN;
    pthread_mutex_lock(&lock);
    Allocation *each = found(pointer, 1);
    int status = each && each->mapped && each->at == pointer ? OK : INVALID;
    if (!status) unmap(each);
    pthread_mutex_unlock(&lock);
    return end(status);
}

/* streams and events */

static long long now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}
int cudaStreamCreateWithFlags(void **stream, unsigned flags) { BEGIN; *stream = malloc(1); return OK; }
int cudaStreamDestroy(void *stream) { BEGIN; free(stream); return OK; }
int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) { BEGIN; return end(stream && event ? OK : BAD_HANDLE); }
int cudaStreamSynchronize(void *stream) { BEGIN; return OK; }
int cudaEventCreateWithFlags(void **event, unsigned flags) { BEGIN; *event = calloc(1, sizeof(Event)); return OK; }
int cudaEventDestroy(void *event) { BEGIN; free(event); return OK; }
int cudaEventRecord(void *event, void *stream) { BEGIN; ((Event *)event)->told_ns = now_ns(); return OK; }
int cudaEventSynchronize(void *event) { BEGIN; return OK; }
int cudaEventQuery(void *event) { BEGIN; return OK; }
int cudaEventElapsedTime(float *ms, void *first, void *second) {
    BEGIN;
    *ms = (float)((double)(((Event *)second)->told_ns - ((Event *)first)->told_ns) / 1e6);
    return OK;
}

/* errors */

int cudaGetLastError(void) { int status = last; last = OK; return status; }
const char *cudaGetErrorString(int status) { return status ? "said by the stub" : "no error"; }
