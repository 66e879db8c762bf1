#include "backend_library.h"

#include "../../kernels/cpu/backend_cpu.h"
#include "../base/mem.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

/* Sizes of the structs of BACKEND_ABI at revision 1. Every library has these fields. */
#define FIRST_BYTES (offsetof(struct backend, add_rms_norm) + sizeof(void (*)(void)))
#define FIRST_TRAITS_BYTES (offsetof(struct device_traits, short_tokens) + sizeof(uint32_t))

/* A loaded library and the core's copies of its structs. Fields that the library does not have are zero in the copies. */
struct library {
    void *handle;
    struct backend table;
    struct device_traits traits;
    struct library *next;
};

static struct library *libraries;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static const struct backend_host HOST = {
    .abi = BACKEND_ABI, .revision = BACKEND_REVISION, .size_bytes = sizeof(struct backend), .err_set = err_set,
    .err_name = err_name, .dtype_info = dtype_info, .dtype_to_float = dtype_to_float, .dtype_from_float = dtype_from_float};

/* The entries that the core can neither do without nor compose from others. */
static const struct {
    const char *name;
    size_t offset;
} REQUIRED[] = {
#define ROW(entry) {#entry, offsetof(struct backend, entry)}
    ROW(name), ROW(traits), ROW(open), ROW(close), ROW(describe), ROW(fusions), ROW(supports), ROW(activations),
    ROW(buffer_create), ROW(buffer_destroy), ROW(upload), ROW(download), ROW(synchronize), ROW(matrix_create),
    ROW(matrix_destroy), ROW(matrix_bytes), ROW(matrix_arithmetic), ROW(matrix_write), ROW(matrix_read), ROW(kv_layer_bytes),
    ROW(embed), ROW(linear), ROW(rms_norm), ROW(gated), ROW(add), ROW(select), ROW(rope), ROW(kv_write), ROW(attention),
#undef ROW
};

/* Entries that are there only together with another. */
static const struct {
    const char *name, *with;
    size_t offset, with_offset;
} PAIRS[] = {
#define ROW(entry, other) {#entry, #other, offsetof(struct backend, entry), offsetof(struct backend, other)}
    ROW(sample_finish, sample), ROW(graph_begin, graph_end), ROW(graph_end, graph_launch), ROW(graph_launch, graph_destroy),
    ROW(tensor_write, tensor_sum), ROW(tensor_sum, tensor_finish), ROW(pool_release, pool_restore),
    ROW(pool_save, pool_forget),
#undef ROW
};

static enum rc refuse(struct err *err, const char *device, const char *reason)
{
    err_set(err, RC_DEVICE, "device '%.60s': %.400s", device, reason);
    err_name(err, "open", NULL);
    return RC_DEVICE;
}

bool backend_has(const struct backend *backend, size_t offset)
{
    void (*entry)(void);
    memcpy(&entry, (const char *)backend + offset, sizeof entry);
    return entry;
}

static enum rc check_entries(const struct backend *backend, const char *device, struct err *err)
{
    char names[400] = "its library lacks entries that every backend needs:";
    bool is_complete = true;
    for (size_t i = 0; i < sizeof REQUIRED / sizeof *REQUIRED; i++)
        if (!backend_has(backend, REQUIRED[i].offset)) {
            size_t used = strlen(names);
            snprintf(names + used, sizeof names - used, "%s %s", is_complete ? "" : ",", REQUIRED[i].name);
            is_complete = false;
        }
    if (!is_complete)
        return refuse(err, device, names);
    for (size_t i = 0; i < sizeof PAIRS / sizeof *PAIRS; i++)
        if (backend_has(backend, PAIRS[i].offset) && !backend_has(backend, PAIRS[i].with_offset)) {
            snprintf(names, sizeof names, "its library has %s without %s", PAIRS[i].name, PAIRS[i].with);
            return refuse(err, device, names);
        }
    return RC_OK;
}

static void copy_struct(void *to, size_t size_bytes, const void *from, size_t given_bytes)
{
    memset(to, 0, size_bytes);
    memcpy(to, from, given_bytes < size_bytes ? given_bytes : size_bytes);
}

/* Copies the library's structs, as much of them as both sides know. */
static enum rc copy_table(const struct backend *given, struct library *library, const char *device, struct err *err)
{
    char reason[160];
    if (!given)
        return refuse(err, device, "its library needs a newer llmpy");
    if (given->abi != BACKEND_ABI || given->size_bytes < FIRST_BYTES) {
        snprintf(reason, sizeof reason,
                 "its library has a struct backend of ABI %u with %u bytes; wanted ABI %u with at least %zu", given->abi,
                 given->size_bytes, BACKEND_ABI, FIRST_BYTES);
        return refuse(err, device, reason);
    }
    copy_struct(&library->table, sizeof library->table, given, given->size_bytes);
    enum rc rc = check_entries(&library->table, device, err);
    if (rc)
        return rc;
    if (given->traits->size_bytes < FIRST_TRAITS_BYTES) {
        snprintf(reason, sizeof reason, "its library has a struct device_traits of %u bytes; wanted at least %zu",
                 given->traits->size_bytes, FIRST_TRAITS_BYTES);
        return refuse(err, device, reason);
    }
    copy_struct(&library->traits, sizeof library->traits, given->traits, given->traits->size_bytes);
    library->table.traits = &library->traits;
    return RC_OK;
}

/* Asks a library that is new to the process for its table. */
static enum rc add(void *handle, const char *device, struct library **added, struct err *err)
{
    void *symbol = dlsym(handle, BACKEND_SYMBOL);
    if (!symbol)
        return refuse(err, device, "its library has no " BACKEND_SYMBOL);
    backend_entry entry;
    memcpy(&entry, &symbol, sizeof entry);
    struct library *library = mem_calloc(1, sizeof *library);
    if (!library)
        return err_set(err, RC_MEMORY, "device '%.60s': out of memory", device);
    enum rc rc = copy_table(entry(&HOST), library, device, err);
    if (rc) {
        mem_free(library);
        return rc;
    }
    library->handle = handle;
    library->next = libraries;
    *added = libraries = library;
    return RC_OK;
}

static enum rc load(const char *device, const char *path, const struct backend **backend, struct err *err)
{
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle)
        return refuse(err, device, dlerror());
    enum rc rc = RC_OK;
    pthread_mutex_lock(&lock);
    struct library *library = libraries;
    while (library && library->handle != handle)
        library = library->next;
    if (!library)
        rc = add(handle, device, &library, err);
    pthread_mutex_unlock(&lock);
    if (rc)
        dlclose(handle);
    else
        *backend = &library->table;
    return rc;
}

enum rc backend_find(const char *device, const char *library, const struct backend **backend, struct err *err)
{
    *backend = NULL;
    if (strcmp(device, "cpu") == 0) {
        *backend = backend_cpu();
        return RC_OK;
    }
    bool is_cuda = strncmp(device, "cuda", 4) == 0;
    if (!library || !library[0])
        return refuse(err, device, is_cuda ? "this build has no CUDA backend" : "no backend has this name");
    return load(device, library, backend, err);
}
