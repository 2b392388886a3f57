/* A stand-in for libnvidia-ml.so.1: plays the scenario.nvml that lies in the folder from which it was loaded.

   Signatures and return codes are NVML's (nvml.h, as nvidia-ml-py calls them). The scenario has a line a value; the
   last one wins, and what it does not say is a healthy H100 SXM5 80GB:

     driver 580.95.05                          the node's
     count 8
     nvmlInitWithFlags error 9                 a function of the library: its return code
     all.temperature 40                        every GPU's value
     gpu.3.temperature 95                      one GPU's, by NVML index
     gpu.3.temperature unsupported             NVML_ERROR_NOT_SUPPORTED; also: error N
     gpu.3.nvmlDeviceGetTemperature error 15   one function on one GPU: error N | hang | hang-unkillable
     gpu.3.lost handle                         off the bus: no handle, as for a new process | calls: a handle, no answers
     gpu.3.field.94 12                         an NVML_FI_ field value
     gpu.3.nvlink.7 0                          the state of one NVLink
     gpu.3.processes 4711:1048576,4712:0       pid:bytes
     gpu.3.energy 120000                       mJ since the driver was loaded; not supported unless it is given

   What nvidia-smi's setters would change is appended to the scenario, so that the next process sees it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OK, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, GPU_IS_LOST = 15 };
enum { GPUS = 64, LINES = 8192 };

typedef int Return;
typedef struct { int index; } *Device;
typedef unsigned Uint;

static struct { char *key, *value; } lines[LINES];
static int n_lines, behaves, started;
static char folder[4096], *text;
static struct { int index; } gpus[GPUS];

static const char *const healthy[][2] = {
    {"name", "NVIDIA H100 80GB HBM3"}, {"vbios", "96.00.99.00.01"}, {"temperature", "34"}, {"power_limit", "700000"},
    {"threshold.0", "92"}, {"threshold.1", "89"}, {"threshold.2", "95"}, {"threshold.3", "87"},
    {"ecc.volatile", "0"}, {"ecc.aggregate", "0"}, {"ecc_mode", "1"}, {"ecc_pending", "1"},
    {"remapped_correctable", "0"}, {"remapped_uncorrectable", "0"}, {"remap_pending", "0"}, {"remap_failed", "0"},
    {"banks.max", "2560"}, {"banks.high", "0"}, {"banks.partial", "0"}, {"banks.low", "0"}, {"banks.none", "0"},
    {"event_reasons", "1"}, {"pcie_gen", "5"}, {"pcie_width", "16"}, {"max_pcie_gen", "5"}, {"max_pcie_width", "16"},
    {"replay", "0"}, {"persistence", "1"}, {"mig", "0"}, {"mig_pending", "0"}, {"utilization", "0"},
    {"memory_utilization", "0"}, {"pstate", "0"}, {"compute_mode", "0"}, {"default_power_limit", "700000"},
    {"clock", "345"}, {"app_clock", "1980"}, {"default_app_clock", "1980"}, {"nvlinks", "18"},
    {"max_clock", "1980"}, {"power", "71000"}, {"memory_total", "85520809984"}, {"memory_used", "0"},
    {"field.138", "0"}, {"field.139", "0"}, {"field.197", "0"}, {"field.198", "0"},
    {"field.91", "18"}, {"field.38", "0"}, {"field.45", "0"}, {"field.52", "0"}, {"field.59", "0"}, {"field.230", "0"},
    {"processes", ""},
};

/* ---- the scenario ---- */

static const char *find(const char *key) {
    for (int i = n_lines; i-- > 0;)
        if (!strcmp(lines[i].key, key)) return lines[i].value;
    return NULL;
}

static const char *value(Device d, const char *name) {
    char key[128];
    const char *found;
    snprintf(key, sizeof key, "gpu.%d.%s", d->index, name);
    if ((found = find(key))) return found;
    snprintf(key, sizeof key, "all.%s", name);
    if ((found = find(key))) return found;
    for (size_t i = 0; i < sizeof healthy / sizeof *healthy; i++)
        if (!strcmp(healthy[i][0], name)) return healthy[i][1];
    return NULL;
}

static Return code(const char *v) {
    if (!v || !strcmp(v, "unsupported")) return NOT_SUPPORTED;
    return strncmp(v, "error ", 6) ? OK : atoi(v + 6);
}

static Return number(Device d, const char *name, Uint *out) {
    const char *v = value(d, name);
    Return r = code(v);
    if (!out) return INVALID_ARGUMENT;
    if (!r) *out = strtoul(v, NULL, 0);
    return r;
}

static Return string(const char *v, char *out, Uint size) {
    Return r = code(v);
    if (r) return r;
    if (strlen(v) >= size) return INSUFFICIENT_SIZE;
    strcpy(out, v);
    return OK;
}

static void load(void) {
    Dl_info self;
    dladdr((void *)load, &self); /* the path as it was opened, symlinks unresolved: the node's own folder */
    snprintf(folder, sizeof folder, "%s", self.dli_fname);
    char *slash = strrchr(folder, '/');
    if (slash) *slash = 0; else strcpy(folder, ".");
    char path[4200];
    snprintf(path, sizeof path, "%s/scenario.nvml", folder);
    FILE *file = fopen(path, "r");
    free(text);
    text = calloc(1, 1 << 20);
    n_lines = behaves = 0;
    if (!file) return;
    text[fread(text, 1, (1 << 20) - 1, file)] = 0;
    fclose(file);
    for (char *save, *line = strtok_r(text, "\n", &save); line && n_lines < LINES; line = strtok_r(NULL, "\n", &save)) {
        if (*line == '#' || !*line) continue;
        char *space = strchr(line, ' ');
        if (space) *space = 0;
        lines[n_lines].key = line;
        lines[n_lines++].value = space ? space + 1 : "";
        behaves |= strstr(line, "nvml") != NULL;
    }
}

static void append(Device d, const char *name, Uint v) {
    char path[4200];
    snprintf(path, sizeof path, "%s/scenario.nvml", folder);
    FILE *file = fopen(path, "a");
    if (!file) return;
    fprintf(file, "gpu.%d.%s %u\n", d->index, name, v);
    fclose(file);
    load();
}

/* ---- how a call goes wrong ---- */

static int put(const char *folder_path, const char *name, const char *what) {
    char path[4300];
    snprintf(path, sizeof path, "%s/%s", folder_path, name);
    FILE *file = fopen(path, "w");
    if (!file) return -1;
    int bad = fputs(what, file) < 0;
    return fclose(file) || bad ? -1 : 0;
}

/* A task frozen by the cgroup v1 freezer is in D state and does not die of SIGKILL until it is thawed. */
static void hang(int unkillable) {
    if (unkillable) {
        const char *freezer = find("freezer"), *name = find("cell");
        char cell[4200], pid[32];
        snprintf(cell, sizeof cell, "%s/%s%d", freezer ? freezer : "/sys/fs/cgroup/freezer",
                 name ? name : "gpuhealth-fake-", getpid());
        snprintf(pid, sizeof pid, "%d", getpid());
        if (mkdir(cell, 0755) || put(cell, "cgroup.procs", pid) || put(cell, "freezer.state", "FROZEN")) {
            sigset_t all;
            sigfillset(&all);
            sigprocmask(SIG_BLOCK, &all, NULL);
            fprintf(stderr, "stand-in NVML: can't freeze myself in %s; I only ignore signals, SIGKILL ends me\n", cell);
        }
    }
    for (;;) pause();
}

static Return act(const char *what) {
    if (!what) return OK;
    if (!strcmp(what, "hang") || !strcmp(what, "hang-unkillable")) hang(what[4] == '-');
    return code(what);
}

static Return called(const char *function, Device d) {
    if (!started) return UNINITIALIZED;
    Return r = behaves ? act(find(function)) : OK;
    if (r || !d) return r;
    if (find("all.lost") || ({ char k[32]; snprintf(k, sizeof k, "gpu.%d.lost", d->index); find(k); })) return GPU_IS_LOST;
    if (!behaves) return OK;
    char key[160];
    snprintf(key, sizeof key, "gpu.%d.%s", d->index, function);
    return act(find(key));
}

#define TRY(d) do { Return r_ = called(__func__, d); if (r_) return r_; } while (0)

/* ---- the library ---- */

Return nvmlInitWithFlags(Uint flags) {
    (void)flags;
    load();
    for (int i = 0; i < GPUS; i++) gpus[i].index = i;
    started = 1;
    Return r = called(__func__, NULL);
    started = !r;
    return r;
}
Return nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
Return nvmlShutdown(void) { TRY(NULL); started = 0; return OK; }
const char *nvmlErrorString(Return r) {
    static char words[32];
    snprintf(words, sizeof words, "NVML return code %d", r);
    return words;
}
Return nvmlSystemGetDriverVersion(char *out, Uint size) {
    TRY(NULL);
    const char *v = find("driver");
    return string(v ? v : "580.95.05", out, size);
}
Return nvmlSystemGetNVMLVersion(char *out, Uint size) {
    TRY(NULL);
    const char *v = find("nvml");
    return string(v ? v : "13.580.95.05", out, size);
}
Return nvmlDeviceGetCount_v2(Uint *out) {
    TRY(NULL);
    const char *v = find("count");
    *out = v ? strtoul(v, NULL, 0) : 8;
    return OK;
}
Return nvmlDeviceGetHandleByIndex_v2(Uint index, Device *out) {
    TRY(NULL);
    const char *v = find("count");
    if (index >= (v ? strtoul(v, NULL, 0) : 8) || index >= GPUS) return INVALID_ARGUMENT;
    *out = (Device)&gpus[index];
    char key[160];
    snprintf(key, sizeof key, "gpu.%u.lost", index);
    const char *lost = find(key);
    if (lost && strcmp(lost, "calls")) return GPU_IS_LOST;
    snprintf(key, sizeof key, "gpu.%u.%s", index, __func__);
    return act(find(key));
}
static Return by_value(const char *name, const char *wanted, Device *out) {
    const char *v = find("count");
    for (unsigned i = 0; i < (v ? strtoul(v, NULL, 0) : 8) && i < GPUS; i++) {
        const char *have = value((Device)&gpus[i], name);
        if (have && !strcasecmp(have, wanted)) return nvmlDeviceGetHandleByIndex_v2(i, out);
    }
    return NOT_FOUND;
}
Return nvmlDeviceGetHandleByUUID(const char *uuid, Device *out) { TRY(NULL); return by_value("uuid", uuid, out); }
Return nvmlDeviceGetHandleByPciBusId_v2(const char *bus, Device *out) { TRY(NULL); return by_value("bus_id", bus, out); }
Return nvmlDeviceGetIndex(Device d, Uint *out) { TRY(d); *out = d->index; return OK; }

#define TEXT(F, K) Return F(Device d, char *out, Uint size) { TRY(d); return string(value(d, K), out, size); }
TEXT(nvmlDeviceGetUUID, "uuid")
TEXT(nvmlDeviceGetSerial, "serial")
TEXT(nvmlDeviceGetVbiosVersion, "vbios")
TEXT(nvmlDeviceGetName, "name")

#define NUMBER(F, K) Return F(Device d, Uint *out) { TRY(d); return number(d, K, out); }
NUMBER(nvmlDeviceGetMinorNumber, "minor")
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, "pcie_gen")
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, "pcie_width")
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, "max_pcie_gen")
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, "max_pcie_width")
NUMBER(nvmlDeviceGetPcieReplayCounter, "replay")
NUMBER(nvmlDeviceGetPersistenceMode, "persistence")
NUMBER(nvmlDeviceGetPerformanceState, "pstate")
NUMBER(nvmlDeviceGetComputeMode, "compute_mode")
NUMBER(nvmlDeviceGetPowerManagementLimit, "power_limit")
NUMBER(nvmlDeviceGetEnforcedPowerLimit, "power_limit")
NUMBER(nvmlDeviceGetPowerUsage, "power")
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, "default_power_limit")

#define TWO(F, A, B) Return F(Device d, Uint *a, Uint *b) { TRY(d); Return r = number(d, A, a); return r ? r : number(d, B, b); }
TWO(nvmlDeviceGetEccMode, "ecc_mode", "ecc_pending")
TWO(nvmlDeviceGetMigMode, "mig", "mig_pending")

#define CLOCK(F, K) Return F(Device d, int type, Uint *out) { (void)type; TRY(d); return number(d, K, out); }
CLOCK(nvmlDeviceGetClockInfo, "clock")
CLOCK(nvmlDeviceGetMaxClockInfo, "max_clock")
CLOCK(nvmlDeviceGetApplicationsClock, "app_clock")
CLOCK(nvmlDeviceGetDefaultApplicationsClock, "default_app_clock")

static Return wide(Device d, const char *name, unsigned long long *out) {
    const char *v = value(d, name);
    Return r = code(v);
    *out = r ? 0 : strtoull(v, NULL, 0);
    return r;
}
Return nvmlDeviceGetTotalEnergyConsumption(Device d, unsigned long long *out) { TRY(d); return wide(d, "energy", out); }
Return nvmlDeviceGetMemoryInfo(Device d, unsigned long long out[3]) { /* total, free, used */
    TRY(d);
    Return r = wide(d, "memory_total", &out[0]);
    if (!r) r = wide(d, "memory_used", &out[2]);
    out[1] = out[0] - out[2];
    return r;
}
Return nvmlDeviceGetCurrentClocksEventReasons(Device d, unsigned long long *out) { TRY(d); return wide(d, "event_reasons", out); }
Return nvmlDeviceGetCurrentClocksThrottleReasons(Device d, unsigned long long *out) { TRY(d); return wide(d, "event_reasons", out); }
Return nvmlDeviceGetTotalEccErrors(Device d, int type, int counter, unsigned long long *out) {
    TRY(d);
    *out = 0;
    return type ? wide(d, counter ? "ecc.aggregate" : "ecc.volatile", out) : OK; /* 1: uncorrected */
}
Return nvmlDeviceGetTemperature(Device d, int sensor, Uint *out) {
    TRY(d);
    return sensor ? INVALID_ARGUMENT : number(d, "temperature", out);
}
Return nvmlDeviceGetTemperatureThreshold(Device d, int which, Uint *out) {
    char name[32];
    TRY(d);
    snprintf(name, sizeof name, "threshold.%d", which);
    return number(d, name, out);
}
Return nvmlDeviceGetRemappedRows(Device d, Uint *correctable, Uint *uncorrectable, Uint *pending, Uint *failed) {
    TRY(d);
    Return r = number(d, "remapped_correctable", correctable);
    if (!r) r = number(d, "remapped_uncorrectable", uncorrectable);
    if (!r) r = number(d, "remap_pending", pending);
    return r ? r : number(d, "remap_failed", failed);
}
Return nvmlDeviceGetRowRemapperHistogram(Device d, Uint out[5]) {
    static const char *const names[] = {"banks.max", "banks.high", "banks.partial", "banks.low", "banks.none"};
    TRY(d);
    Return r = OK;
    for (int i = 0; i < 5 && !r; i++) r = number(d, names[i], &out[i]);
    return r;
}
Return nvmlDeviceGetUtilizationRates(Device d, Uint out[2]) {
    TRY(d);
    Return r = number(d, "utilization", &out[0]);
    return r ? r : number(d, "memory_utilization", &out[1]);
}

typedef struct { char legacy[16]; Uint domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
Return nvmlDeviceGetPciInfo_v3(Device d, Pci *out) {
    TRY(d);
    memset(out, 0, sizeof *out);
    const char *v = value(d, "bus_id"); /* 00000000:1B:00.0, as NVML writes it */
    if (!v || sscanf(v, "%x:%x:%x", &out->domain, &out->bus, &out->device) != 3) return NOT_SUPPORTED;
    snprintf(out->legacy, sizeof out->legacy, "%04x:%02x:%02x.0", out->domain & 0xffff, out->bus & 0xff, out->device & 0xff);
    snprintf(out->bus_id, sizeof out->bus_id, "%s", v);
    out->id = 0x233010de;
    return OK;
}

static Return link_state(Device d, Uint link, Uint *out) {
    char name[32];
    Uint links = 0;
    Return r = number(d, "nvlinks", &links);
    if (r || link >= links) return r ? r : INVALID_ARGUMENT;
    snprintf(name, sizeof name, "nvlink.%u", link);
    if (!value(d, name)) { *out = 1; return OK; }
    return number(d, name, out);
}
Return nvmlDeviceGetNvLinkState(Device d, Uint link, Uint *out) { TRY(d); return link_state(d, link, out); }
Return nvmlDeviceGetNvLinkErrorCounter(Device d, Uint link, int which, unsigned long long *out) {
    Uint state;
    TRY(d);
    *out = 0;
    Return r = link_state(d, link, &state);
    return r ? r : wide(d, which == 1 ? "field.59" : which ? "field.38" : "field.52", out);
}

typedef struct { uint32_t field, scope; int64_t time, latency; Uint type; Return result; union { unsigned long long u; double f; } value; } Field;
Return nvmlDeviceGetFieldValues(Device d, int count, Field *fields) {
    TRY(d);
    for (int i = 0; i < count; i++) {
        char name[32];
        Uint state = 0;
        snprintf(name, sizeof name, "field.%u", fields[i].field);
        fields[i].result = fields[i].field == 165 ? link_state(d, fields[i].scope, &state) : wide(d, name, &fields[i].value.u);
        if (fields[i].field == 165) fields[i].value.u = state;
        fields[i].type = 3; /* unsigned long long */
    }
    return OK;
}

typedef struct { Uint pid; unsigned long long memory; Uint instance, compute_instance; } Process;
Return nvmlDeviceGetComputeRunningProcesses_v3(Device d, Uint *count, Process *out) {
    TRY(d);
    const char *v = value(d, "processes");
    Return r = code(v);
    Uint room = *count, n = 0;
    if (r) return r;
    while (*v) {
        char *end;
        Process p = {strtoul(v, &end, 10), 0, ~0u, ~0u};
        if (end == v) break;
        if (*end == ':') p.memory = strtoull(end + 1, &end, 10);
        if (out && n < room) out[n] = p;
        n++;
        v = *end ? end + 1 : end;
    }
    *count = n;
    return n > room ? INSUFFICIENT_SIZE : OK;
}
Return nvmlDeviceGetComputeRunningProcesses_v2(Device d, Uint *count, Process *out) {
    return nvmlDeviceGetComputeRunningProcesses_v3(d, count, out);
}

Return nvmlDeviceSetComputeMode(Device d, int mode) { TRY(d); append(d, "compute_mode", mode); return OK; }
Return nvmlDeviceSetPowerManagementLimit(Device d, Uint limit) { TRY(d); append(d, "power_limit", limit); return OK; }
Return nvmlDeviceResetApplicationsClocks(Device d) {
    Uint normal;
    TRY(d);
    Return r = number(d, "default_app_clock", &normal);
    if (!r) append(d, "app_clock", normal);
    return r;
}
Return nvmlDeviceResetGpuLockedClocks(Device d) { TRY(d); append(d, "event_reasons", 1); return OK; }
Return nvmlDeviceResetMemoryLockedClocks(Device d) { TRY(d); return OK; }
