/* py_tap.c: the method of _core.Model for intermediate values. */
#define PY_SSIZE_T_CLEAN
#include "py_engine.h"

#include "../base/mem.h"
#include "../program/tap.h"

static size_t width_of(const struct program *p, long value)
{
    if (value < 0)
        return p->vocab_size;
    return value < (long)p->n_values ? p->values[value].width : p->tower->values[value - (long)p->n_values].width;
}

/* A list of bytes for the values of one rank, and where they lie. NULL with an exception set. */
static PyObject *make_rows(const struct program *program, PyObject *numbers, const struct tap_prompt *prompt,
                           struct tapped *wanted)
{
    long n_all = (long)program->n_values + (program->tower ? (long)program->tower->n_values : 0);
    Py_ssize_t n = PyList_Size(numbers);
    PyObject *list = PyList_New(n);
    for (Py_ssize_t i = 0; list && i < n; i++) {
        long value = PyLong_AsLong(PyList_GetItem(numbers, i));
        bool is_known = value < 0 ? program_has_logits(program) : value < n_all;
        if (!is_known && !PyErr_Occurred())
            PyErr_Format(PyExc_ValueError, "tap: wanted the number of a value, have %ld", value);
        wanted[i].value = value < 0 ? TAP_LOGITS : (uint32_t)value;
        size_t n_floats = is_known ? tap_rows(program, prompt, wanted[i].value) * width_of(program, value) : 0;
        PyObject *rows = PyErr_Occurred()
                             ? NULL : PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(n_floats * sizeof(float)));
        if (!rows || PyList_SetItem(list, i, rows) < 0)
            Py_CLEAR(list);
        else
            wanted[i].rows = (float *)PyBytes_AsString(rows);
    }
    return list;
}

struct tapping {
    struct team *team;
    struct request_spec spec; /* its prompt, with token types and images */
    struct tapped *wanted;
    uint32_t n_wanted;
};

static struct tap_prompt prompt_of(const struct tapping *t)
{
    const struct request_spec *spec = &t->spec;
    return (struct tap_prompt){
        .ids = spec->prompt.ids, .types = spec->types.n ? spec->types.ids : NULL, .n_tokens = spec->prompt.n,
        .n_items = spec->n_items, .n_prefix = spec->is_score ? spec->score_start : spec->prompt.n, .items = spec->items,
        .rope_positions = spec->rope_positions.n ? spec->rope_positions.ids : NULL,
    };
}

static enum rc run(const struct tapping *t, struct err *err)
{
    const struct tap_prompt prompt = prompt_of(t);
    return team_tap(t->team, &prompt, t->wanted, t->n_wanted, err);
}

static enum rc run_between_steps(struct engine *engine, void *ctx, struct err *err)
{
    const struct tapping *t = ctx;
    uint32_t holds = engine_holds(engine);
    if (holds & HOLD_UPDATE)
        return err_set(err, RC_BUSY, "tap: the weights are being updated; commit or abort the update first");
    if (holds & HOLD_TORN)
        return engine_refusal(engine, err);
    enum rc rc = engine_check_prompt(engine, &t->spec, err);
    return rc ? rc : run(t, err);
}

/* Lists of bytes by rank, which the run fills. NULL with an exception set. */
static PyObject *make_lists(struct tapping *t, PyObject *numbers)
{
    const struct tap_prompt prompt = prompt_of(t);
    uint32_t n_ranks = team_n_all_ranks(t->team);
    t->n_wanted = (uint32_t)PyList_Size(numbers);
    t->wanted = mem_calloc((size_t)n_ranks * t->n_wanted + 1, sizeof *t->wanted);
    PyObject *list = t->wanted ? PyList_New(0) : PyErr_NoMemory();
    for (uint32_t rank = 0; list && rank < n_ranks; rank++) {
        struct tapped *wanted = t->wanted + (size_t)rank * t->n_wanted;
        PyObject *rows = make_rows(team_program(t->team, rank), numbers, &prompt, wanted);
        if (!rows || PyList_Append(list, rows) < 0)
            Py_CLEAR(list);
        Py_XDECREF(rows);
    }
    return list;
}

/* 0, or -1 with an exception set. */
static int run_alone(struct tapping *t)
{
    struct err err = {0};
    PyThreadState *gil = PyEval_SaveThread();
    enum rc rc = run(t, &err);
    PyEval_RestoreThread(gil);
    if (rc)
        py_raise(&err);
    return rc ? -1 : 0;
}

/* tap(ids, value numbers, runner, params) -> for each rank a list of bytes, float32 [n_tokens][width]. Number -1 is
 * the logits. Numbers from the program's values on are those of its tower, and have rows of images. The prompt runs between two
 * steps of the runner, the Engine or EngineThread that runs the model; None: nothing runs it, and the prompt is a text. params:
 * those of a request, of which only token types, images and score_start matter. */
PyObject *py_tap(PyObject *self, PyObject *args)
{
    PyObject *ids, *numbers, *runner, *params, *list = NULL;
    struct py_scratch scratch = {0};
    struct tapping t = {.team = py_model_borrow(self)};
    if (!t.team)
        return NULL;
    if (PyArg_ParseTuple(args, "OO!OO!", &ids, &PyList_Type, &numbers, &runner, &PyDict_Type, &params) &&
        py_parse_request(ids, params, &t.spec, &scratch) == 0)
        list = make_lists(&t, numbers);
    if (list && (runner == Py_None ? run_alone(&t) : py_engine_call(runner, run_between_steps, &t)) < 0)
        Py_CLEAR(list);
    mem_free(t.wanted);
    py_scratch_free(&scratch);
    py_model_return(self);
    return list;
}
