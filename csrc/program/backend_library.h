/* backend_library.h: from a device's name to its backend. The CPU's is part of the core; every other one is a shared library
 * that is loaded when a device of its kind is first asked for and then stays. It loads without a driver, too: what is missing
 * shows when a device is opened or asked about. Any thread. */
#ifndef LLMPY_BACKEND_LIBRARY_H
#define LLMPY_BACKEND_LIBRARY_H

#include "../../kernels/backend.h"

/* device: "cpu", "cuda" or "cuda:N"; library: path of its backend, NULL or "" when this build has none. */
enum rc backend_find(const char *device, const char *library, const struct backend **backend, struct err *err);

#endif
