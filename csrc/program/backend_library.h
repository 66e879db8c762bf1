/* backend_library.h: finds the backend of a device. The CPU's backend is part of the core. Every other backend is a shared
 * library, which is loaded at the first request for a device of its kind and stays loaded. The core copies the library's struct
 * backend, so a library with a shorter or longer struct than the core's works, too. Any thread. */
#ifndef LLMPY_BACKEND_LIBRARY_H
#define LLMPY_BACKEND_LIBRARY_H

#include "../../kernels/backend.h"

/* device: "cpu", "KIND" or "KIND:ID"; library: path of the kind's shared library, NULL or "" for the CPU. The error RC_DEVICE
 * says what is wrong with the library. */
enum rc backend_find(const char *device, const char *library, const struct backend **backend, struct err *err);
bool backend_has(const struct backend *backend, size_t offset); /* whether the entry at this offset of the struct is not NULL */

#endif
