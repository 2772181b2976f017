/* A stand-in for libnvidia-ml.so.1: what pynvml asks for of it, answered from a text file.
 *
 * Compiled by nvml_stub.py. The file is named by NVML_STUB and is read at every call, so that a test changes what there
 * is while somebody asks. Its lines are words: `UUID name NAME` makes a GPU, `mig UUID PARENT` a MIG device of it, and
 * `UUID KEY VALUE...` is what they tell: what has no line is not supported. `fail CALL CODE`, `fail CALL@UUID CODE` and
 * `fail every@UUID CODE` fail a call, `hang CALL FIFO` has it wait until somebody opens the FIFO. Each call is noted in
 * NVML_STUB with ".calls" at its end.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7 };
enum { LINE = 512, MOST = 16 };

typedef struct { char uuid[96], parent[96]; } Device;
typedef unsigned long long u64;

/* As in nvml.h. */
typedef struct { char old[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Place;
typedef struct { unsigned gpu, memory; } Rates;
typedef struct { u64 total, free, used; } Memory;
typedef struct { unsigned version; u64 total, reserved, free, used; } MemoryV2;
typedef struct { unsigned version, sensor; int temperature; } Temperature;
typedef struct { unsigned pid; u64 used; unsigned gpu_instance, compute_instance; } Process;

static int started;
static Device kept[2 * MOST]; /* handles are pointers to these, and stay what they are */
static int count_kept;

/* Find the line that begins with these two words, and give what follows them. */
static int find(const char *first, const char *second, char *rest) {
    char line[LINE], a[96], b[96];
    int at, found = 0;
    FILE *file = fopen(getenv("NVML_STUB"), "r");
    while (!found && file && fgets(line, sizeof line, file)) {
        at = 0;
        if (sscanf(line, "%95s %95s %n", a, b, &at) >= 2 && !strcmp(a, first) && !strcmp(b, second)) {
            strcpy(rest, line + at);
            rest[strcspn(rest, "\n")] = 0;
            found = 1;
        }
    }
    if (file) fclose(file);
    return found;
}

/* Give the UUIDs in the order of the file: GPUs, or with a parent its MIG devices. */
static int list(const char *parent, char uuids[][96]) {
    char line[LINE], a[96], b[96], c[96];
    int number = 0, words;
    FILE *file = fopen(getenv("NVML_STUB"), "r");
    while (file && number < MOST && fgets(line, sizeof line, file)) {
        words = sscanf(line, "%95s %95s %95s", a, b, c);
        if (parent ? words == 3 && !strcmp(a, "mig") && !strcmp(c, parent)
                   : words == 3 && !strncmp(a, "GPU-", 4) && !strcmp(b, "name"))
            strcpy(uuids[number++], parent ? b : a);
    }
    if (file) fclose(file);
    return number;
}

static Device *keep(const char *uuid, const char *parent) {
    int index;
    for (index = 0; index < count_kept; index++)
        if (!strcmp(kept[index].uuid, uuid)) return &kept[index];
    strcpy(kept[count_kept].uuid, uuid);
    strcpy(kept[count_kept].parent, parent);
    return &kept[count_kept++];
}

/* Note a call, hang in it or fail it as the file says. */
static int begin(const char *call, const Device *device) {
    char rest[LINE], path[LINE], both[256];
    FILE *calls;
    snprintf(path, sizeof path, "%s.calls", getenv("NVML_STUB"));
    if ((calls = fopen(path, "a"))) {
        fprintf(calls, "%s\n", call);
        fclose(calls);
    }
    if (find("hang", call, rest)) close(open(rest, O_RDONLY));
    if (device) {
        snprintf(both, sizeof both, "%s@%s", call, device->uuid);
        if (find("fail", both, rest)) return atoi(rest);
        snprintf(both, sizeof both, "every@%s", device->uuid);
        if (find("fail", both, rest)) return atoi(rest);
    }
    if (find("fail", call, rest)) return atoi(rest);
    return started || !strncmp(call, "nvmlInit", 8) ? SUCCESS : UNINITIALIZED;
}

/* Answer with what the device's line of this key says. */
static int told(const char *call, const Device *device, const char *key, char *rest) {
    int status = begin(call, device);
    return status ? status : find(device->uuid, key, rest) ? SUCCESS : NOT_SUPPORTED;
}

static int text(const char *call, const Device *device, const char *key, char *to, unsigned length) {
    char rest[LINE];
    int status = told(call, device, key, rest);
    if (!status) snprintf(to, length, "%s", rest);
    return status;
}

static int number(const char *call, const Device *device, const char *key, unsigned *to) {
    char rest[LINE];
    int status = told(call, device, key, rest);
    if (!status) *to = strtoul(rest, 0, 0);
    return status;
}

static int wide(const char *call, const Device *device, const char *key, u64 *to) {
    char rest[LINE];
    int status = told(call, device, key, rest);
    if (!status) *to = strtoull(rest, 0, 0);
    return status;
}

/* Be as new, for the next test of the same process. */
void stub_reset(void) { started = count_kept = 0; }

int nvmlInitWithFlags(unsigned flags) {
    int status = begin(__func__, 0);
    if (!status) started++;
    return status;
}

int nvmlShutdown(void) {
    int status = begin(__func__, 0);
    if (!status) started--;
    return status;
}

const char *nvmlErrorString(int code) { return "an error of the stub's"; }

int nvmlSystemGetDriverVersion(char *to, unsigned length) {
    snprintf(to, length, "580.95.05");
    return begin(__func__, 0);
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    char uuids[MOST][96];
    *count = list(0, uuids);
    return begin(__func__, 0);
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
    char uuids[MOST][96];
    if (index >= (unsigned)list(0, uuids)) return INVALID;
    *device = keep(uuids[index], "");
    return begin(__func__, *device);
}

int nvmlDeviceGetUUID(Device *device, char *to, unsigned length) {
    snprintf(to, length, "%s", device->uuid);
    return begin(__func__, device);
}

int nvmlDeviceGetName(Device *device, char *to, unsigned length) {
    return text(__func__, device, "name", to, length);
}

int nvmlDeviceGetPciInfo_v3(Device *device, Place *to) {
    return text(__func__, device, "bus_id", to->bus_id, sizeof to->bus_id);
}

int nvmlDeviceGetUtilizationRates(Device *device, Rates *to) {
    char rest[LINE];
    int status = told(__func__, device, "utilization", rest);
    if (!status) sscanf(rest, "%u %u", &to->gpu, &to->memory);
    return status;
}

int nvmlDeviceGetMemoryInfo(Device *device, Memory *to) {
    char rest[LINE];
    int status = told(__func__, device, "memory", rest);
    if (!status) sscanf(rest, "%llu %llu", &to->total, &to->used);
    return status;
}

/* What the driver keeps for itself is not in `used` here. */
int nvmlDeviceGetMemoryInfo_v2(Device *device, MemoryV2 *to) {
    char rest[LINE];
    u64 both;
    int status = told(__func__, device, "memory", rest);
    if (to->version != 0x02000028) return 25;
    if (!status) {
        sscanf(rest, "%llu %llu %llu", &to->total, &both, &to->reserved);
        to->used = both - to->reserved;
    }
    return status;
}

int nvmlDeviceGetPowerUsage(Device *device, unsigned *to) { return number(__func__, device, "power", to); }

int nvmlDeviceGetEnforcedPowerLimit(Device *device, unsigned *to) {
    return number(__func__, device, "power_limit", to);
}

int nvmlDeviceGetTotalEnergyConsumption(Device *device, u64 *to) { return wide(__func__, device, "energy", to); }

int nvmlDeviceGetTemperature(Device *device, unsigned sensor, unsigned *to) {
    return number(__func__, device, "temperature", to);
}

int nvmlDeviceGetTemperatureV(Device *device, Temperature *to) {
    if (to->version != 0x100000C || to->sensor != 0) return 25;
    return number(__func__, device, "temperature", (unsigned *)&to->temperature);
}

static int clock_of(const char *call, const Device *device, const char *key, unsigned kind, unsigned *to) {
    unsigned clocks[4];
    char rest[LINE];
    int status = told(call, device, key, rest);
    if (kind > 3) return INVALID;
    if (!status && sscanf(rest, "%u %u %u %u", clocks, clocks + 1, clocks + 2, clocks + 3) == 4) *to = clocks[kind];
    return status;
}

int nvmlDeviceGetClockInfo(Device *device, unsigned kind, unsigned *to) {
    return clock_of(__func__, device, "clocks", kind, to);
}

int nvmlDeviceGetMaxClockInfo(Device *device, unsigned kind, unsigned *to) {
    return clock_of(__func__, device, "clock_limits", kind, to);
}

int nvmlDeviceGetCurrentClocksEventReasons(Device *device, u64 *to) {
    return wide(__func__, device, "reasons", to);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, u64 *to) {
    return wide(__func__, device, "reasons", to);
}

/* The line has pids and bytes in turns, and "self" for whoever asks. */
int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned *count, Process *to) {
    char rest[LINE], *word;
    unsigned room = *count, found = 0;
    int status = told(__func__, device, "processes", rest);
    if (status) return status;
    for (word = strtok(rest, " "); word; word = strtok(0, " ")) {
        unsigned pid = strcmp(word, "self") ? (unsigned)atoi(word) : (unsigned)getpid();
        word = strtok(0, " ");
        if (to && found < room) to[found] = (Process){pid, strtoull(word, 0, 0), 0, 0};
        found++;
    }
    *count = found;
    return found > room ? TOO_SMALL : SUCCESS;
}

int nvmlDeviceGetMigMode(Device *device, unsigned *current, unsigned *pending) {
    int status = number(__func__, device, "mig_mode", current);
    *pending = *current;
    return status;
}

int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned *count) {
    *count = 7;
    return begin(__func__, device);
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned index, Device **to) {
    char uuids[MOST][96];
    if (index >= (unsigned)list(device->uuid, uuids)) return NOT_FOUND;
    *to = keep(uuids[index], device->uuid);
    return begin(__func__, device);
}
