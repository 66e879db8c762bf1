/* py_engine.h: what py_engine.c and py_async_engine.c share: parsing of a request's and an engine's dictionaries, and news.
 * What is parsed borrows from the dictionaries, which must outlive it, and from a scratch of its own. */
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
/* A dictionary of one record of news (class News of _core.pyi). */
PyObject *py_news(const struct news *news);
/* What is new about tokens alone: (columns, last token's time, preemptions, epoch); the columns are ids, and where they were
 * asked for raw, full, processed, kept mass, rank, and the alternatives' ids, values, ranks. */
PyObject *py_more(const struct news *news);
int py_append_news(PyObject *list, const struct news *news, uint32_t n);

/* Hands the engine of a _core.Engine to a thread; until it is given back, driving calls raise EngineBusyError. NULL with an
 * exception. */
struct engine *py_engine_lend(PyObject *object);
void py_engine_give_back(PyObject *object);

/* Runs a function between two steps of a _core.Engine, here, or of a _core.EngineThread, on its thread. 0, or -1 with an
 * exception. */
typedef enum rc engine_function(struct engine *engine, void *ctx, struct err *err);
int py_engine_call(PyObject *object, engine_function *function, void *ctx);
/* The same for a _core.EngineThread alone; 1: it is none. */
int py_thread_call(PyObject *object, engine_function *function, void *ctx);

/* sleep(level, parts) and wake(parts) of both classes. */
PyObject *py_engine_sleep(PyObject *object, PyObject *args);
PyObject *py_engine_wake(PyObject *object, PyObject *args);

/* "eos" and so on; NULL for FINISH_NONE. */
const char *py_finish_name(enum finish finish);
/* What Engine.stats, step_log and histograms return. */
PyObject *py_stats(const struct engine_stats *stats);
PyObject *py_step_log(struct engine *engine, uint32_t max);
/* (number behind the last, [(number, kind, hash, parent or None, group, ids, salt), ...]): events from a number on. */
PyObject *py_kv_events(struct engine *engine, uint64_t next);
PyObject *py_histograms(struct engine *engine);

#endif
