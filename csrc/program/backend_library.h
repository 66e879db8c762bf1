/* backend_library.h: finds the backend of a device by the device's name. The CPU backend is part of the core. Every other
 * backend is a shared library, which is loaded at the first request for a device of its kind and stays loaded. The library
 * loads on machines without a driver, too; a missing driver is reported when a device is opened or queried. Any thread. */
#ifndef LLMPY_BACKEND_LIBRARY_H
#define LLMPY_BACKEND_LIBRARY_H

#include "../../kernels/backend.h"

/* device: "cpu", "cuda" or "cuda:N"; library: path of the backend's shared library, NULL or "" when this build has none. */
enum rc backend_find(const char *device, const char *library, const struct backend **backend, struct err *err);

#endif
