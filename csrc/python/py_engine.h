/* py_engine.h: functions shared by py_engine.c and py_async_engine.c: they parse the dictionaries of requests and engine
 * options, and make Python objects of output (what a request produced). Parsed structs point into the dictionaries and into the
 * scratch, so both must outlive them. */
#ifndef LLMPY_PY_ENGINE_H
#define LLMPY_PY_ENGINE_H

#include "py.h"

struct py_scratch {
    struct py_block *first;
};

void py_scratch_free(struct py_scratch *scratch);
/* Each returns 0, or -1 with an exception set. */
int py_parse_request(PyObject *prompt, PyObject *params, struct request_spec *spec, struct py_scratch *scratch);
int py_parse_engine(PyObject *options, const struct model_parts *parts, struct engine_config *config,
                    struct py_scratch *scratch);
/* One record of output as a dictionary (class CoreOutput of _core.pyi). */
PyObject *py_output(const struct output *output);
/* A record of output that has only tokens: (columns, last token's time, preemptions, epoch). The columns are ids; if the
 * request wants logprobs also raw, full, processed, kept mass, rank, and the alternatives' ids, values, ranks. */
PyObject *py_more(const struct output *output);
int py_append_outputs(PyObject *list, const struct output *output, uint32_t n);

/* Lends the engine of a _core.Engine to a driver thread. Until py_engine_give_back, calls that drive the engine raise
 * EngineBusyError. NULL with an exception set. */
struct engine *py_engine_lend(PyObject *object);
void py_engine_give_back(PyObject *object);

/* Runs a function between two steps: of a _core.Engine on the calling thread, of a _core.EngineThread on the driver's thread.
 * 0, or -1 with an exception set. */
typedef enum rc engine_function(struct engine *engine, void *ctx, struct err *err);
int py_engine_call(PyObject *object, engine_function *function, void *ctx);
/* As py_engine_call, for a _core.EngineThread only; 1: the object is no _core.EngineThread. */
int py_thread_call(PyObject *object, engine_function *function, void *ctx);

/* sleep(level, parts) and wake(parts) of both classes. */
PyObject *py_engine_sleep(PyObject *object, PyObject *args);
PyObject *py_engine_save_prompt(PyObject *object, PyObject *args);
PyObject *py_engine_wake(PyObject *object, PyObject *args);

/* The finish reason's name, such as "eos"; NULL for FINISH_NONE. */
const char *py_finish_name(enum finish finish);
/* What Engine.stats, step_log and histograms return. */
PyObject *py_stats(const struct engine_stats *stats);
PyObject *py_step_log(struct engine *engine, uint32_t max);
/* Events from number `next` on: (number after the last, [(number, kind, hash, parent or None, group, ids, salt), ...]). */
PyObject *py_kv_events(struct engine *engine, uint64_t next);
PyObject *py_histograms(struct engine *engine);

#endif
