/* py_engine.c: the class _core.Engine. */
#define _GNU_SOURCE
#include "py_connector.h"
#include "py_engine.h"

#include "../base/clock.h"

#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

#define TAKEN_AT_ONCE 64

typedef struct {
    PyObject_HEAD
    PyObject *model, *drafter; /* keep the runners alive; drafter NULL: none */
    struct engine *engine;     /* NULL once closed */
    bool is_driven;            /* a call that drives the engine is in progress; it may release the GIL */
    unsigned long driver;      /* the thread of that call */
    bool closes_later;         /* close() was called from within that call */
    atomic_bool stops;         /* asks run() to return */
    pid_t pid;
} Engine;

/* ---- claiming the engine ---- */

static PyObject *raise(enum rc rc, const char *message)
{
    struct err err;
    err_set(&err, rc, "%s", message);
    return py_raise(&err);
}

static struct engine *opened(Engine *self)
{
    if (!self->engine) {
        raise(RC_CLOSED, "engine is closed");
        return NULL;
    }
    if (self->pid != getpid()) {
        struct err err;
        err_set(&err, RC_CLOSED, "engine belongs to process %ld; create one in this process", (long)self->pid);
        py_raise(&err);
        return NULL;
    }
    return self->engine;
}

/* Claims the engine for one driving call. */
static struct engine *begin(Engine *self)
{
    struct engine *engine = opened(self);
    if (engine && self->is_driven) {
        raise(RC_BUSY, "engine is in use by another thread; use AsyncEngine, which serves several, or a lock");
        return NULL;
    }
    if (engine) {
        self->is_driven = true;
        self->driver = PyThread_get_thread_ident();
    }
    return engine;
}

static void destroy(Engine *self)
{
    struct engine *engine = self->engine;
    self->engine = NULL;
    if (self->pid == getpid() && engine) {
        Py_BEGIN_ALLOW_THREADS /* the cache's threads may need the GIL to end */
        engine_destroy(engine);
        Py_END_ALLOW_THREADS
    }
    Py_CLEAR(self->model);
    Py_CLEAR(self->drafter);
}

static void end(Engine *self)
{
    self->is_driven = false;
    if (self->closes_later)
        destroy(self);
}

static PyObject *close_engine(PyObject *object, PyObject *args)
{
    Engine *self = (Engine *)object;
    (void)args;
    atomic_store(&self->stops, true);
    if (self->is_driven && self->driver == PyThread_get_thread_ident())
        self->closes_later = true;
    while (self->is_driven && !self->closes_later) {
        Py_BEGIN_ALLOW_THREADS
        nanosleep(&(struct timespec){0, 200000}, NULL);
        Py_END_ALLOW_THREADS
    }
    if (!self->closes_later)
        destroy(self);
    Py_RETURN_NONE;
}

/* ---- life ---- */

static int init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"model", "options", NULL};
    Engine *self = (Engine *)object;
    PyObject *model, *options;
    struct model_parts parts;
    struct engine_config config;
    struct py_scratch scratch = {0};
    struct err err;
    if (self->model) {
        PyErr_SetString(PyExc_RuntimeError, "Engine: initialised twice");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!:Engine", names, &model, &PyDict_Type, &options))
        return -1;
    int result = -1;
    config.connector = NULL;
    if (py_model_get(model, &parts) < 0 || py_parse_engine(options, &parts, &config, &scratch) < 0)
        goto out;
    if (engine_create(&config, &self->engine, &err)) {
        py_raise(&err);
        goto out;
    }
    self->model = Py_NewRef(model);
    self->drafter = Py_XNewRef(PyDict_GetItemString(options, "drafter"));
    self->pid = getpid();
    result = 0;
out:
    if (config.connector)
        py_connector_release((struct connector *)config.connector, result == 0);
    py_scratch_free(&scratch);
    return result;
}

static void dealloc(PyObject *object)
{
    destroy((Engine *)object);
    py_deallocate(object);
}

struct engine *py_engine_lend(PyObject *object)
{
    if (PyType_GetSlot(Py_TYPE(object), Py_tp_init) != (void *)init) {
        PyErr_SetString(PyExc_TypeError, "engine: wanted a _core.Engine");
        return NULL;
    }
    struct engine *engine = begin((Engine *)object);
    ((Engine *)object)->driver = engine ? 0 : ((Engine *)object)->driver;
    return engine;
}

void py_engine_give_back(PyObject *object)
{
    end((Engine *)object);
}

int py_engine_call(PyObject *object, engine_function *function, void *ctx)
{
    struct err err;
    enum rc rc;
    int result = py_thread_call(object, function, ctx);
    if (result <= 0)
        return result;
    struct engine *engine = py_engine_lend(object);
    if (!engine)
        return -1;
    Py_BEGIN_ALLOW_THREADS
    rc = function(engine, ctx, &err);
    Py_END_ALLOW_THREADS
    py_engine_give_back(object);
    if (rc)
        py_raise(&err);
    return rc ? -1 : 0;
}

/* ---- requests ---- */

static PyObject *submit(PyObject *object, PyObject *args)
{
    Engine *self = (Engine *)object;
    PyObject *prompt, *params, *result = NULL;
    struct request_spec spec;
    struct py_scratch scratch = {0};
    struct err err;
    uint64_t number;
    if (!opened(self) || !PyArg_ParseTuple(args, "SO!:submit", &prompt, &PyDict_Type, &params))
        return NULL;
    if (py_parse_request(prompt, params, &spec, &scratch) == 0 && opened(self)) { /* parsing may have run Python code */
        if (engine_submit(self->engine, &spec, &number, &err))
            py_raise(&err);
        else
            result = PyLong_FromUnsignedLongLong(number);
    }
    py_scratch_free(&scratch);
    return result;
}

static PyObject *abort_requests(PyObject *object, PyObject *numbers)
{
    Engine *self = (Engine *)object;
    struct err err;
    if (!opened(self))
        return NULL;
    Py_ssize_t n = numbers == Py_None ? 0 : PySequence_Size(numbers);
    if (n < 0)
        return NULL;
    if (numbers == Py_None && engine_abort(self->engine, NULL, 0, &err))
        return py_raise(&err);
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PySequence_GetItem(numbers, i);
        uint64_t number = item ? PyLong_AsUnsignedLongLong(item) : 0;
        Py_XDECREF(item);
        if (PyErr_Occurred() || !opened(self))
            return NULL;
        if (engine_abort(self->engine, &number, 1, &err))
            return py_raise(&err);
    }
    Py_RETURN_NONE;
}

/* ---- steps ---- */

static PyObject *step(PyObject *object, PyObject *args)
{
    Engine *self = (Engine *)object;
    (void)args;
    struct err err;
    bool progressed;
    enum rc rc;
    struct engine *engine = begin(self);
    if (!engine)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    rc = engine_step(engine, &progressed, &err);
    Py_END_ALLOW_THREADS
    end(self);
    return rc ? py_raise(&err) : PyBool_FromLong(progressed);
}

static PyObject *run(PyObject *object, PyObject *timeout)
{
    Engine *self = (Engine *)object;
    struct err err;
    bool progressed, has_unfinished;
    enum rc rc;
    long long timeout_ms = PyLong_AsLongLong(timeout);
    if (timeout_ms == -1 && PyErr_Occurred())
        return NULL;
    struct engine *engine = begin(self);
    if (!engine)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    double deadline = seconds_now() + (double)timeout_ms * 1e-3;
    do {
        rc = engine_step(engine, &progressed, &err);
        has_unfinished = engine_has_unfinished(engine);
    } while (!rc && has_unfinished && !engine_n_finished(engine) && !atomic_load(&self->stops) && seconds_now() < deadline);
    Py_END_ALLOW_THREADS
    end(self);
    return rc ? py_raise(&err) : PyBool_FromLong(has_unfinished);
}

static PyObject *take(PyObject *object, PyObject *finished_only)
{
    Engine *self = (Engine *)object;
    struct output output[TAKEN_AT_ONCE];
    struct err err;
    uint32_t n = TAKEN_AT_ONCE;
    int only = PyObject_IsTrue(finished_only);
    struct engine *engine = only < 0 ? NULL : begin(self);
    if (!engine)
        return NULL;
    PyObject *list = PyList_New(0);
    while (list && n == TAKEN_AT_ONCE) {
        if (engine_take(engine, only, output, TAKEN_AT_ONCE, &n, &err)) {
            py_raise(&err);
            Py_CLEAR(list);
        } else if (py_append_outputs(list, output, n) < 0) {
            Py_CLEAR(list);
        }
    }
    end(self);
    return list;
}

/* ---- the rest ---- */

static PyObject *has_unfinished(PyObject *object, PyObject *args)
{
    (void)args;
    struct engine *engine = opened((Engine *)object);
    return engine ? PyBool_FromLong(engine_has_unfinished(engine)) : NULL;
}

static PyObject *is_dead(PyObject *object, PyObject *args)
{
    (void)args;
    struct err fault;
    struct engine *engine = opened((Engine *)object);
    return engine ? PyBool_FromLong(engine_fault(engine, &fault) != RC_OK) : NULL;
}

static PyObject *raise_refusal(PyObject *object, PyObject *args)
{
    (void)args;
    struct err err;
    struct engine *engine = opened((Engine *)object);
    if (!engine)
        return NULL;
    if (engine_refusal(engine, &err))
        return py_raise(&err);
    Py_RETURN_NONE;
}

static PyObject *weight_epoch(PyObject *object, PyObject *args)
{
    (void)args;
    struct engine *engine = opened((Engine *)object);
    return engine ? PyLong_FromUnsignedLong(engine_epoch(engine)) : NULL;
}

static PyObject *holds(PyObject *object, PyObject *args)
{
    (void)args;
    struct engine *engine = opened((Engine *)object);
    return engine ? PyLong_FromUnsignedLong(engine_holds(engine)) : NULL;
}

static PyObject *hold_new(PyObject *object, PyObject *flag)
{
    int truth = PyObject_IsTrue(flag);
    struct engine *engine = truth < 0 ? NULL : opened((Engine *)object);
    if (!engine)
        return NULL;
    engine_hold_new(engine, truth);
    Py_RETURN_NONE;
}

static PyObject *settle(PyObject *object, PyObject *args)
{
    (void)args;
    struct err err;
    enum rc rc;
    struct engine *engine = begin((Engine *)object);
    if (!engine)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    rc = engine_settle(engine, &err);
    Py_END_ALLOW_THREADS
    end((Engine *)object);
    if (rc)
        return py_raise(&err);
    Py_RETURN_NONE;
}

struct bed {
    unsigned int level, parts;
};

static enum rc go_to_sleep(struct engine *engine, void *ctx, struct err *err)
{
    const struct bed *bed = ctx;
    return engine_sleep(engine, bed->level, bed->parts, err);
}

static enum rc wake_up(struct engine *engine, void *ctx, struct err *err)
{
    const struct bed *bed = ctx;
    return engine_wake(engine, bed->parts, err);
}

PyObject *py_engine_sleep(PyObject *object, PyObject *args)
{
    struct bed bed;
    if (!PyArg_ParseTuple(args, "II:sleep", &bed.level, &bed.parts) || py_engine_call(object, go_to_sleep, &bed) < 0)
        return NULL;
    Py_RETURN_NONE;
}

struct saving {
    struct request_spec spec;
    uint32_t n_tokens;
};

static enum rc save_prompt(struct engine *engine, void *ctx, struct err *err)
{
    struct saving *saving = ctx;
    return engine_save_prompt(engine, &saving->spec, &saving->n_tokens, err);
}

PyObject *py_engine_save_prompt(PyObject *object, PyObject *args)
{
    PyObject *prompt, *params;
    struct saving saving = {0};
    struct py_scratch scratch = {0};
    int bad = !PyArg_ParseTuple(args, "OO!:save_prompt", &prompt, &PyDict_Type, &params) ||
              py_parse_request(prompt, params, &saving.spec, &scratch) < 0 || py_engine_call(object, save_prompt, &saving) < 0;
    py_scratch_free(&scratch);
    return bad ? NULL : PyLong_FromUnsignedLong(saving.n_tokens);
}

PyObject *py_engine_wake(PyObject *object, PyObject *args)
{
    struct bed bed = {0};
    if (!PyArg_ParseTuple(args, "I:wake", &bed.parts) || py_engine_call(object, wake_up, &bed) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *reset_prefix_cache(PyObject *object, PyObject *recompute)
{
    struct err err;
    int truth = PyObject_IsTrue(recompute);
    struct engine *engine = truth < 0 ? NULL : opened((Engine *)object);
    if (!engine)
        return NULL;
    if (engine_reset_prefix_cache(engine, truth, &err))
        return py_raise(&err);
    Py_RETURN_NONE;
}

static PyObject *move_adapter(PyObject *object, PyObject *args)
{
    struct err err;
    unsigned long long from, to;
    if (!PyArg_ParseTuple(args, "KK:move_adapter", &from, &to))
        return NULL;
    struct engine *engine = opened((Engine *)object);
    if (!engine)
        return NULL;
    if (engine_move_adapter(engine, from, to, &err))
        return py_raise(&err);
    Py_RETURN_NONE;
}

static PyObject *stats(PyObject *object, PyObject *args)
{
    (void)args;
    struct engine_stats s;
    struct engine *engine = opened((Engine *)object);
    if (!engine)
        return NULL;
    engine_stats(engine, &s);
    return py_stats(&s);
}

static PyObject *step_log(PyObject *object, PyObject *max)
{
    long long n = PyLong_AsLongLong(max);
    struct engine *engine = n == -1 && PyErr_Occurred() ? NULL : opened((Engine *)object);
    return engine ? py_step_log(engine, n < 0 ? 0 : n > UINT32_MAX ? UINT32_MAX : (uint32_t)n) : NULL;
}

static PyObject *kv_events(PyObject *object, PyObject *next)
{
    unsigned long long from = PyLong_AsUnsignedLongLong(next);
    struct engine *engine = PyErr_Occurred() ? NULL : opened((Engine *)object);
    return engine ? py_kv_events(engine, from) : NULL;
}

static PyObject *histograms(PyObject *object, PyObject *args)
{
    (void)args;
    struct engine *engine = opened((Engine *)object);
    return engine ? py_histograms(engine) : NULL;
}

static PyObject *check(PyObject *object, PyObject *args)
{
    (void)args;
    struct err err;
    struct engine *engine = begin((Engine *)object);
    if (!engine)
        return NULL;
    enum rc rc = engine_check(engine, &err);
    end((Engine *)object);
    if (rc)
        return py_raise(&err);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"submit", submit, METH_VARARGS, "Queues a request; returns its number."},
    {"abort", abort_requests, METH_O, "Ends the requests of these numbers, or all (None), at the next step boundary."},
    {"step", step, METH_NOARGS, "Runs one step; False if there was nothing to do."},
    {"run", run, METH_O,
     "Runs steps until a sample finishes, the milliseconds have passed or no work is left; False if none is left."},
    {"take", take, METH_O, "New output since the last call; with True only of finished samples."},
    {"has_unfinished", has_unfinished, METH_NOARGS, "True if any sample has not finished."},
    {"is_dead", is_dead, METH_NOARGS, "True if a fault has killed the engine."},
    {"raise_refusal", raise_refusal, METH_NOARGS, "Raises an error if no step may run."},
    {"hold_new", hold_new, METH_O, "With True later requests wait outside the scheduler."},
    {"settle", settle, METH_NOARGS, "Waits until no step is in flight."},
    {"holds", holds, METH_NOARGS, "The reasons why no step may run: bits of enum engine_hold."},
    {"sleep", py_engine_sleep, METH_VARARGS, "sleep(level, parts): bits of enum sleep_part."},
    {"save_prompt", py_engine_save_prompt, METH_VARARGS,
     "Saves a prompt's blocks where other engines find them; the number of leading tokens that are there."},
    {"wake", py_engine_wake, METH_VARARGS, "wake(parts): bits of enum sleep_part."},
    {"weight_epoch", weight_epoch, METH_NOARGS, "Number of commits of weights since the load."},
    {"reset_prefix_cache", reset_prefix_cache, METH_O,
     "Drops all cached blocks; with True running requests recompute their blocks."},
    {"move_adapter", move_adapter, METH_VARARGS,
     "move_adapter(from, to): requests with an adapter go on with another one, and recompute their blocks."},
    {"stats", stats, METH_NOARGS, "A snapshot of the counters."},
    {"step_log", step_log, METH_O, "The last n steps at most, the oldest first."},
    {"kv_events", kv_events, METH_O, "Events of the prefix cache from a number on, and the number after the last of them."},
    {"histograms", histograms, METH_NOARGS, "By name: bounds, counts (one more than bounds) and the sum of the values."},
    {"check", check, METH_NOARGS, "Checks the invariants; RuntimeError names a broken one."},
    {"close", close_engine, METH_NOARGS, "Frees all memory; may be called twice."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_init, init},
    {Py_tp_dealloc, dealloc},
    {Py_tp_methods, methods},
    {Py_tp_doc, "Scheduler, block manager and sequences over a Model. One driver thread at a time."},
    {0, NULL},
};

static PyType_Spec spec = {"llmpy._core.Engine", sizeof(Engine), 0, Py_TPFLAGS_DEFAULT, slots};

int py_engine_register(PyObject *module)
{
    return py_add_type(module, &spec);
}
