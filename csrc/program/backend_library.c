#include "backend_library.h"

#include <dlfcn.h>
#include <string.h>

static enum rc refuse(struct err *err, const char *device, const char *reason)
{
    err_set(err, RC_DEVICE, "device '%.60s': %.400s", device, reason);
    err_name(err, "open", NULL);
    return RC_DEVICE;
}

static enum rc load(const char *device, const char *library, const struct backend **backend, struct err *err)
{
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!handle)
        return refuse(err, device, dlerror());
    void *symbol = dlsym(handle, BACKEND_SYMBOL);
    if (!symbol)
        return refuse(err, device, "its library has no " BACKEND_SYMBOL);
    backend_entry entry;
    memcpy(&entry, &symbol, sizeof entry);
    *backend = entry();
    if ((*backend)->abi == BACKEND_ABI && (*backend)->size_bytes == sizeof **backend)
        return RC_OK;
    return refuse(err, device, "its library is of another build; build both together");
}

enum rc backend_find(const char *device, const char *library, const struct backend **backend, struct err *err)
{
    *backend = NULL;
    if (strcmp(device, "cpu") == 0) {
        *backend = backend_cpu();
        return RC_OK;
    }
    if (strncmp(device, "cuda", 4) != 0 || (device[4] && device[4] != ':'))
        return refuse(err, device, "wanted cpu, cuda or cuda:N");
    if (!library || !library[0])
        return refuse(err, device, "this build has no CUDA backend");
    return load(device, library, backend, err);
}
