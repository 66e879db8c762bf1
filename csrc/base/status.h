/* status.h: how the functions of csrc and kernels report errors. A function that can fail returns enum rc and, on failure,
 * fills the caller's struct err. It never prints, aborts or exits. Only py_error.c turns an err into a Python exception. Part
 * of the public backend ABI: append only. */
#ifndef LLMPY_STATUS_H
#define LLMPY_STATUS_H

#include <stdint.h>

enum rc {
    RC_OK = 0,
    RC_MEMORY,        /* host memory: MemoryError */
    RC_INVALID,       /* a request that cannot run: InvalidRequestError, what = parameter */
    RC_CONFIG,        /* an engine option: ConfigError, what = option */
    RC_CHECKPOINT,    /* a damaged or wrong file: CheckpointError, what = file, tensor = tensor */
    RC_UNSUPPORTED,   /* UnsupportedError */
    RC_IO,            /* the operating system refused: OSError, what = path, code = errno */
    RC_DEVICE,        /* DeviceError, what = operation, code = the device driver's error code */
    RC_DEVICE_MEMORY, /* DeviceMemoryError, code = wanted bytes, free_bytes = free bytes */
    RC_DEAD,          /* use after a device fault: EngineDeadError */
    RC_BUSY,          /* another thread drives the engine: EngineBusyError */
    RC_CLOSED,        /* EngineClosedError */
    RC_INTERNAL,      /* a bug in llmpy: RuntimeError */
    RC_QUEUE_FULL,    /* QueueFullError, code = number of waiting sequences */
    RC_ASLEEP,        /* EngineAsleepError */
    RC_WEIGHTS_MISSING, /* the weights are incomplete or discarded: WeightsMissingError */
    RC_WEIGHTS        /* weights that do not fit: WeightUpdateError, code = enum weights_fault, what = name */
};

enum weights_fault { WEIGHTS_UNKNOWN = 1, WEIGHTS_MISMATCHED = 2, WEIGHTS_MISSING = 3 };

struct err {
    enum rc rc;
    int64_t code;
    char message[512];
    char what[256];
    char tensor[192];
    int64_t free_bytes; /* RC_DEVICE_MEMORY */
};

/* ---- functions of the core: the header for other packages ends here (csrc/compiling.py) ---- */

/* Fills err (which may be NULL) with a printf-style message and returns rc. */
enum rc err_set(struct err *err, enum rc rc, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Names the parameter, option, file or operation that err is about; call after err_set. */
void err_name(struct err *err, const char *what, const char *tensor);

#endif
