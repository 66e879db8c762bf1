/* py_async_engine.c: the classes EngineThread, Subscription and Notifier of _core. The driver's thread never takes the GIL. A
 * forked child does not have that thread, and locks may be held for ever, so its calls fail and its deallocators free nothing
 * of the driver. */
#define _GNU_SOURCE
#include "py_engine.h"

#include "../engine/driver.h"

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#define TAKEN_AT_ONCE 64

typedef struct {
    PyObject_HEAD PyObject *engine; /* lent to the driver; NULL once closed */
    PyTypeObject *subscription_type;
    struct driver *driver;
    pid_t pid;
    unsigned generation; /* of the process that made the object */
} Thread;

typedef struct {
    PyObject_HEAD PyObject *thread;
    struct subscription *subscription;
    bool is_taken; /* a call reads what subscription_take gave; another call sees this only if there is no GIL */
} Subscription;

typedef struct {
    PyObject_HEAD PyObject *thread;
    struct notifier *notifier; /* NULL once closed */
} Notifier;

static PyObject *raise_rc(enum rc rc, const char *message)
{
    struct err err;
    err_set(&err, rc, "%s", message);
    return py_raise(&err);
}

/* A method without arguments that calls a function of the object's driver, subscription or notifier (struct kind). COMMAND
 * returns None, NUMBER what the function returns. */
#define COMMAND(method, kind, function)                                                                               \
    static PyObject *method(PyObject *object, PyObject *args)                                                         \
    {                                                                                                                 \
        (void)args;                                                                                                   \
        struct kind *target = kind##_of(object);                                                                      \
        return target ? (function(target), Py_NewRef(Py_None)) : NULL;                                                \
    }
#define NUMBER(method, kind, make, function)                                                                          \
    static PyObject *method(PyObject *object, PyObject *args)                                                         \
    {                                                                                                                 \
        (void)args;                                                                                                   \
        struct kind *target = kind##_of(object);                                                                      \
        return target ? make(function(target)) : NULL;                                                                \
    }

/* The number of forks between the process that loaded the module and this one. getpid() would take longer than the rest of a
 * call. */
static atomic_uint generation;

static void count_fork(void)
{
    atomic_fetch_add(&generation, 1);
}

static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, count_fork);
}

static bool is_foreign(PyObject *thread)
{
    return ((Thread *)thread)->generation != atomic_load_explicit(&generation, memory_order_relaxed);
}

/* The driver, or NULL with an exception set. */
static struct driver *driver_of(PyObject *object)
{
    Thread *self = (Thread *)object;
    struct err err;
    if (!self->driver) {
        PyErr_SetString(PyExc_RuntimeError, "EngineThread: not initialised");
        return NULL;
    }
    if (!is_foreign(object))
        return self->driver;
    err_set(&err, RC_CLOSED, "engine belongs to process %ld; create one in this process", (long)self->pid);
    py_raise(&err);
    return NULL;
}

/* ---- EngineThread: life ---------------------------------------------------------------------------------------------- */

static int thread_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"engine", "max_queued", NULL};
    Thread *self = (Thread *)object;
    PyObject *engine;
    unsigned int max_queued = 0;
    struct err err;
    if (self->driver) {
        PyErr_SetString(PyExc_RuntimeError, "EngineThread: initialised twice");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|I:EngineThread", names, &engine, &max_queued))
        return -1;
    PyObject *module = PyType_GetModule(Py_TYPE(object));
    if (!module || !(self->subscription_type = (PyTypeObject *)PyObject_GetAttrString(module, "Subscription")))
        return -1;
    struct engine *lent = py_engine_lend(engine);
    if (!lent)
        return -1;
    if (driver_create(lent, max_queued, &self->driver, &err)) {
        py_engine_give_back(engine);
        py_raise(&err);
        return -1;
    }
    self->engine = Py_NewRef(engine);
    self->pid = getpid();
    self->generation = atomic_load(&generation);
    return 0;
}

static void close_thread(Thread *self)
{
    struct driver *driver = self->driver;
    Py_BEGIN_ALLOW_THREADS
    driver_close(driver);
    Py_END_ALLOW_THREADS
    PyObject *engine = self->engine;
    self->engine = NULL;
    if (engine)
        py_engine_give_back(engine);
    Py_XDECREF(engine);
}

static PyObject *thread_close(PyObject *object, PyObject *args)
{
    (void)args;
    if (!driver_of(object))
        return NULL;
    close_thread((Thread *)object);
    Py_RETURN_NONE;
}

static void thread_dealloc(PyObject *object)
{
    Thread *self = (Thread *)object;
    if (self->driver && !is_foreign(object)) {
        close_thread(self);
        driver_release(self->driver);
    }
    Py_XDECREF((PyObject *)self->subscription_type);
    py_deallocate(object);
}

/* ---- EngineThread: requests and commands ----------------------------------------------------------------------------- */

static int notifier_init(PyObject *object, PyObject *args, PyObject *kwargs);

/* Gets the notifier of a Notifier, or NULL of None. False with an exception set. */
static bool parse_notifier(PyObject *object, struct notifier **notifier)
{
    *notifier = NULL;
    if (object == Py_None)
        return true;
    if (PyType_GetSlot(Py_TYPE(object), Py_tp_init) != (void *)notifier_init) {
        PyErr_SetString(PyExc_TypeError, "notifier: wanted a _core.Notifier or None");
        return false;
    }
    if (!(*notifier = ((Notifier *)object)->notifier))
        raise_rc(RC_CLOSED, "notifier is closed");
    return *notifier != NULL;
}

static PyObject *thread_submit(PyObject *object, PyObject *args)
{
    PyObject *notifier_object, *prompt, *params;
    int ends_only;
    struct request_spec spec;
    struct py_scratch scratch = {0};
    struct notifier *notifier;
    struct err err;
    Subscription *subscription = NULL;
    struct driver *driver = driver_of(object);
    if (!driver || !PyArg_ParseTuple(args, "OSO!p:submit", &notifier_object, &prompt, &PyDict_Type, &params, &ends_only))
        return NULL;
    if (py_parse_request(prompt, params, &spec, &scratch) < 0 || !parse_notifier(notifier_object, &notifier))
        goto out;
    if (!(subscription = py_allocate(((Thread *)object)->subscription_type)))
        goto out;
    subscription->thread = Py_NewRef(object);
    if (driver_submit(driver, notifier, &spec, ends_only, &subscription->subscription, &err)) {
        py_raise(&err);
        Py_CLEAR(subscription);
    }
out:
    py_scratch_free(&scratch);
    return (PyObject *)subscription;
}

static PyObject *thread_reset_prefix_cache(PyObject *object, PyObject *recompute)
{
    struct err err;
    int truth = PyObject_IsTrue(recompute);
    struct driver *driver = truth < 0 ? NULL : driver_of(object);
    if (!driver)
        return NULL;
    if (driver_reset_prefix_cache(driver, truth, &err))
        return py_raise(&err);
    Py_RETURN_NONE;
}

static PyObject *thread_move_adapter(PyObject *object, PyObject *args)
{
    struct err err;
    unsigned long long from, to;
    if (!PyArg_ParseTuple(args, "KK:move_adapter", &from, &to))
        return NULL;
    struct driver *driver = driver_of(object);
    if (!driver)
        return NULL;
    if (driver_move_adapter(driver, from, to, &err))
        return py_raise(&err);
    Py_RETURN_NONE;
}

static PyObject *thread_pause(PyObject *object, PyObject *mode)
{
    unsigned long value = PyLong_AsUnsignedLong(mode);
    struct driver *driver = PyErr_Occurred() ? NULL : driver_of(object);
    if (!driver)
        return NULL;
    if (value > PAUSE_ABORT)
        return PyErr_Format(PyExc_ValueError, "pause: wanted a mode of 0 to 3, have %lu", value);
    driver_pause(driver, (enum pause_mode)value);
    Py_RETURN_NONE;
}

static PyObject *thread_begin_sleep(PyObject *object, PyObject *mode)
{
    struct driver *driver = driver_of(object);
    unsigned long value = driver ? PyLong_AsUnsignedLong(mode) : 0;
    if (!driver || PyErr_Occurred())
        return NULL;
    if (value < PAUSE_WAIT || value > PAUSE_ABORT)
        return PyErr_Format(PyExc_ValueError, "begin_sleep: wanted a mode of 1 to 3, have %lu", value);
    driver_begin_sleep(driver, (enum pause_mode)value);
    Py_RETURN_NONE;
}

COMMAND(thread_stop, driver, driver_stop)
COMMAND(thread_abort_all, driver, driver_abort_all)
COMMAND(thread_end_sleep, driver, driver_end_sleep)
NUMBER(thread_is_pausing, driver, PyBool_FromLong, driver_is_pausing)
NUMBER(thread_state, driver, PyLong_FromUnsignedLong, driver_state)
NUMBER(thread_next_boundary, driver, PyLong_FromUnsignedLongLong, driver_next_boundary)
NUMBER(thread_boundary, driver, PyLong_FromUnsignedLongLong, driver_boundary)

static PyObject *thread_wait(PyObject *object, PyObject *args)
{
    unsigned int states;
    unsigned long long boundary;
    double seconds;
    bool holds;
    struct driver *driver = driver_of(object);
    if (!driver || !PyArg_ParseTuple(args, "IKd:wait", &states, &boundary, &seconds))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    holds = driver_wait(driver, states, boundary, seconds);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(holds);
}

static PyObject *thread_raise_fault(PyObject *object, PyObject *args)
{
    (void)args;
    struct err err;
    struct driver *driver = driver_of(object);
    if (!driver)
        return NULL;
    if (driver_fault(driver, &err))
        return py_raise(&err);
    Py_RETURN_NONE;
}

int py_thread_call(PyObject *object, engine_function *function, void *ctx)
{
    struct err err;
    enum rc rc;
    if (PyType_GetSlot(Py_TYPE(object), Py_tp_init) != (void *)thread_init)
        return 1;
    struct driver *driver = driver_of(object);
    if (!driver)
        return -1;
    Py_BEGIN_ALLOW_THREADS
    rc = driver_call(driver, function, ctx, &err);
    Py_END_ALLOW_THREADS
    if (rc)
        py_raise(&err);
    return rc ? -1 : 0;
}

/* How a prompt's blocks go from pool to pool: what other is another thread's driver, or a socket. */
enum lending { FETCH, LEND, BORROW };

static PyObject *hand_over(PyObject *object, PyObject *other, PyObject *prompt, PyObject *params, enum lending how)
{
    struct request_spec spec = {0};
    struct py_scratch scratch = {0};
    struct err err;
    enum rc rc = RC_OK;
    uint32_t n_tokens = 0;
    int socket = how == FETCH ? 0 : (int)PyLong_AsLong(other);
    struct driver *own = PyErr_Occurred() ? NULL : driver_of(object), *from = own && how == FETCH ? driver_of(other) : own;
    int bad = !from || py_parse_request(prompt, params, &spec, &scratch) < 0;
    if (!bad) {
        Py_BEGIN_ALLOW_THREADS
        rc = how == FETCH  ? driver_fetch(own, from, &spec, &n_tokens, &err)
             : how == LEND ? driver_lend(own, &spec, socket, &err)
                           : driver_borrow(own, &spec, socket, &n_tokens, &err);
        Py_END_ALLOW_THREADS
    }
    py_scratch_free(&scratch);
    return bad ? NULL : rc ? py_raise(&err) : PyLong_FromUnsignedLong(n_tokens);
}

static PyObject *fetch_prompt(PyObject *object, PyObject *args)
{
    PyObject *other, *prompt, *params;
    if (!PyArg_ParseTuple(args, "OOO!:fetch_prompt", &other, &prompt, &PyDict_Type, &params))
        return NULL;
    if (Py_TYPE(other) == Py_TYPE(object) && other != object)
        return hand_over(object, other, prompt, params, FETCH);
    PyErr_SetString(PyExc_TypeError, "source must be another EngineThread");
    return NULL;
}

static PyObject *lend_prompt(PyObject *object, PyObject *args)
{
    PyObject *socket, *prompt, *params;
    if (!PyArg_ParseTuple(args, "OOO!:lend_prompt", &socket, &prompt, &PyDict_Type, &params))
        return NULL;
    return hand_over(object, socket, prompt, params, LEND);
}

static PyObject *borrow_prompt(PyObject *object, PyObject *args)
{
    PyObject *socket, *prompt, *params;
    if (!PyArg_ParseTuple(args, "OOO!:borrow_prompt", &socket, &prompt, &PyDict_Type, &params))
        return NULL;
    return hand_over(object, socket, prompt, params, BORROW);
}

static enum rc walk(struct engine *engine, void *ctx, struct err *err)
{
    (void)ctx;
    return engine_check(engine, err);
}

static PyObject *thread_check(PyObject *object, PyObject *args)
{
    (void)args;
    if (py_thread_call(object, walk, NULL) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* ---- Subscription ---- */

static struct subscription *subscription_of(PyObject *object)
{
    return driver_of(((Subscription *)object)->thread) ? ((Subscription *)object)->subscription : NULL;
}

static void subscription_dealloc(PyObject *object)
{
    Subscription *self = (Subscription *)object;
    if (self->subscription && !is_foreign(self->thread))
        subscription_drop(self->subscription);
    Py_XDECREF(self->thread);
    py_deallocate(object);
}

static PyObject *subscription_get_number(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(subscription_number(((Subscription *)object)->subscription));
}

static PyObject *subscription_take_all(PyObject *object, PyObject *args)
{
    (void)args;
    Subscription *self = (Subscription *)object;
    struct output output[TAKEN_AT_ONCE];
    struct err err;
    uint32_t n = TAKEN_AT_ONCE;
    struct subscription *subscription = subscription_of(object);
    if (!subscription)
        return NULL;
    if (self->is_taken)
        return raise_rc(RC_BUSY, "subscription is being read by another thread");
    self->is_taken = true;
    PyObject *list = PyList_New(0);
    while (list && n == TAKEN_AT_ONCE) {
        if (subscription_take(subscription, output, TAKEN_AT_ONCE, &n, &err)) {
            py_raise(&err);
            Py_CLEAR(list);
        } else if (py_append_outputs(list, output, n) < 0) {
            Py_CLEAR(list);
        }
    }
    self->is_taken = false;
    return list;
}

static PyObject *subscription_take_tokens(PyObject *object, PyObject *args)
{
    (void)args;
    Subscription *self = (Subscription *)object;
    struct output output;
    struct subscription *subscription = subscription_of(object);
    if (!subscription)
        return NULL;
    if (self->is_taken)
        return raise_rc(RC_BUSY, "subscription is being read by another thread");
    self->is_taken = true;
    PyObject *result = subscription_take_more(subscription, &output) ? py_more(&output) : Py_NewRef(Py_None);
    self->is_taken = false;
    return result;
}

static PyObject *subscription_wait_for_output(PyObject *object, PyObject *timeout)
{
    double seconds = PyFloat_AsDouble(timeout);
    struct subscription *subscription = PyErr_Occurred() ? NULL : subscription_of(object);
    bool has_output;
    if (!subscription)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    has_output = subscription_wait(subscription, seconds);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(has_output);
}

COMMAND(subscription_abort_request, subscription, subscription_abort)
COMMAND(subscription_end_waiting, subscription, subscription_end_wait)

static PyObject *subscription_move_to(PyObject *object, PyObject *args)
{
    PyObject *notifier_object;
    int ends_only;
    struct notifier *notifier;
    struct subscription *subscription = subscription_of(object);
    if (!subscription || !PyArg_ParseTuple(args, "Op:move", &notifier_object, &ends_only) ||
        !parse_notifier(notifier_object, &notifier))
        return NULL;
    subscription_move(subscription, notifier, ends_only);
    Py_RETURN_NONE;
}

/* ---- Notifier --------------------------------------------------------------------------------------------------------- */

static struct notifier *notifier_of(PyObject *object)
{
    Notifier *self = (Notifier *)object;
    if (!self->thread || !driver_of(self->thread))
        return NULL;
    if (!self->notifier)
        raise_rc(RC_CLOSED, "notifier is closed");
    return self->notifier;
}

static int notifier_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"thread", NULL};
    Notifier *self = (Notifier *)object;
    PyObject *thread;
    struct err err;
    if (self->thread) {
        PyErr_SetString(PyExc_RuntimeError, "Notifier: initialised twice");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:Notifier", names, &thread))
        return -1;
    if (PyType_GetSlot(Py_TYPE(thread), Py_tp_init) != (void *)thread_init) {
        PyErr_SetString(PyExc_TypeError, "thread: wanted a _core.EngineThread");
        return -1;
    }
    struct driver *driver = driver_of(thread);
    if (!driver)
        return -1;
    if (notifier_create(driver, &self->notifier, &err)) {
        py_raise(&err);
        return -1;
    }
    self->thread = Py_NewRef(thread);
    return 0;
}

static void forget_notifier(Notifier *self)
{
    struct notifier *notifier = self->notifier;
    self->notifier = NULL;
    if (notifier && !is_foreign(self->thread))
        notifier_destroy(notifier);
}

static void notifier_dealloc(PyObject *object)
{
    Notifier *self = (Notifier *)object;
    forget_notifier(self);
    Py_XDECREF(self->thread);
    py_deallocate(object);
}

static PyObject *notifier_close(PyObject *object, PyObject *args)
{
    (void)args;
    forget_notifier((Notifier *)object);
    Py_RETURN_NONE;
}

NUMBER(notifier_fileno, notifier, PyLong_FromLong, notifier_descriptor)

static PyObject *notifier_take_all(PyObject *object, PyObject *args)
{
    (void)args;
    uint64_t numbers[TAKEN_AT_ONCE];
    uint32_t n = TAKEN_AT_ONCE, states, all_states = 0;
    struct notifier *notifier = notifier_of(object);
    PyObject *list = notifier ? PyList_New(0) : NULL;
    while (list && n == TAKEN_AT_ONCE) {
        notifier_take(notifier, numbers, TAKEN_AT_ONCE, &n, &states);
        all_states |= states;
        for (uint32_t i = 0; list && i < n; i++) {
            PyObject *number = PyLong_FromUnsignedLongLong(numbers[i]);
            if (!number || PyList_Append(list, number) < 0)
                Py_CLEAR(list);
            Py_XDECREF(number);
        }
    }
    return list ? Py_BuildValue("(IN)", all_states, list) : NULL;
}

static PyObject *notifier_watch_for(PyObject *object, PyObject *args)
{
    unsigned int states;
    unsigned long long boundary;
    struct notifier *notifier = notifier_of(object);
    if (!notifier || !PyArg_ParseTuple(args, "IK:watch", &states, &boundary))
        return NULL;
    notifier_watch(notifier, states, boundary);
    Py_RETURN_NONE;
}

/* ---- tables ---------------------------------------------------------------------------------------------------------- */

static PyMethodDef thread_methods[] = {
    {"submit", thread_submit, METH_VARARGS, "Queues a request; returns its Subscription."},
    {"abort_all", thread_abort_all, METH_NOARGS, "Ends every request at the next step boundary."},
    {"move_adapter", thread_move_adapter, METH_VARARGS, "As Engine.move_adapter."},
    {"reset_prefix_cache", thread_reset_prefix_cache, METH_O, "As Engine.reset_prefix_cache."},
    {"pause", thread_pause, METH_O, "0 resumes; 1 waits for the submitted requests, 2 freezes them, 3 ends them."},
    {"begin_sleep", thread_begin_sleep, METH_O, "Pauses until end_sleep, independently of pause."},
    {"end_sleep", thread_end_sleep, METH_NOARGS, "Ends the pause of begin_sleep."},
    {"save_prompt", py_engine_save_prompt, METH_VARARGS, "As Engine.save_prompt."},
    {"fetch_prompt", fetch_prompt, METH_VARARGS,
     "Copies the blocks of a prompt from the pool of another EngineThread; the number of leading tokens that are there now."},
    {"lend_prompt", lend_prompt, METH_VARARGS, "Lends the blocks of a prompt to another process, over a local socket."},
    {"borrow_prompt", borrow_prompt, METH_VARARGS, "As fetch_prompt, from another process's lend_prompt."},
    {"sleep", py_engine_sleep, METH_VARARGS, "As Engine.sleep."},
    {"wake", py_engine_wake, METH_VARARGS, "As Engine.wake."},
    {"is_pausing", thread_is_pausing, METH_NOARGS, "True from the start of a pause until it is ended."},
    {"state", thread_state, METH_NOARGS, "Bits of enum driver_state."},
    {"next_boundary", thread_next_boundary, METH_NOARGS, "The step boundary at which all earlier calls have taken effect."},
    {"boundary", thread_boundary, METH_NOARGS, "The last step boundary that has passed."},
    {"wait", thread_wait, METH_VARARGS, "Waits for a state or a boundary; False after a timeout."},
    {"raise_fault", thread_raise_fault, METH_NOARGS, "Raises the error that ended the engine, if there was one."},
    {"check", thread_check, METH_NOARGS, "As Engine.check, between two steps."},
    {"stop", thread_stop, METH_NOARGS, "Ends every request and then the thread; does not wait."},
    {"close", thread_close, METH_NOARGS, "Stops, waits for the end and releases the engine; may be called twice."},
    {NULL, NULL, 0, NULL},
};

static PyMethodDef subscription_methods[] = {
    {"take", subscription_take_all, METH_NOARGS, "New output since the last call."},
    {"take_more", subscription_take_tokens, METH_NOARGS, "New output that is only tokens of one sample, else None."},
    {"wait", subscription_wait_for_output, METH_O, "Waits for new output; False after a timeout."},
    {"abort", subscription_abort_request, METH_NOARGS, "Ends the request at the next step boundary."},
    {"end_wait", subscription_end_waiting, METH_NOARGS, "No more blocks come for a request with awaits_s."},
    {"move", subscription_move_to, METH_VARARGS, "Sets the Notifier (or None) that reports new output, or only the end."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef subscription_properties[] = {
    {"number", subscription_get_number, NULL, "The request's number.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef notifier_methods[] = {
    {"fileno", notifier_fileno, METH_NOARGS, "A descriptor that is readable when take has a result."},
    {"take", notifier_take_all, METH_NOARGS, "Watched states that have come about, and numbers of requests with new output."},
    {"watch", notifier_watch_for, METH_VARARGS, "Reports these states and the boundary, once each."},
    {"close", notifier_close, METH_NOARGS, "Closes the descriptor; may be called twice."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot thread_slots[] = {
    {Py_tp_init, thread_init},
    {Py_tp_dealloc, thread_dealloc},
    {Py_tp_methods, thread_methods},
    {Py_tp_doc, "A thread that runs the steps of an Engine; meanwhile no other thread can."},
    {0, NULL},
};

static PyType_Slot subscription_slots[] = {
    {Py_tp_dealloc, subscription_dealloc},
    {Py_tp_methods, subscription_methods},
    {Py_tp_getset, subscription_properties},
    {Py_tp_doc, "A request's new output, merged until it is taken. Dropping the Subscription ends the request."},
    {0, NULL},
};

static PyType_Slot notifier_slots[] = {
    {Py_tp_init, notifier_init},
    {Py_tp_dealloc, notifier_dealloc},
    {Py_tp_methods, notifier_methods},
    {Py_tp_doc, "Tells an event loop which requests have new output."},
    {0, NULL},
};

static PyType_Spec thread_spec = {"llmpy._core.EngineThread", sizeof(Thread), 0, Py_TPFLAGS_DEFAULT, thread_slots};
static PyType_Spec subscription_spec = {"llmpy._core.Subscription", sizeof(Subscription), 0,
                                        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, subscription_slots};
static PyType_Spec notifier_spec = {"llmpy._core.Notifier", sizeof(Notifier), 0, Py_TPFLAGS_DEFAULT, notifier_slots};

int py_async_engine_register(PyObject *module)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    bool bad = py_add_type(module, &thread_spec) < 0 || py_add_type(module, &subscription_spec) < 0 ||
               py_add_type(module, &notifier_spec) < 0;
    return bad ? -1 : 0;
}
