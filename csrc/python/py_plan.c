/* py_plan.c: shows a program's plan, for tests: its steps, and where their tensors lie in the arena. */
#include "py_program.h"

#include "../program/plan.h"

/* (offset, width, stride), or None for no value */
static PyObject *place_tuple(const struct place *place)
{
    return place->width ? Py_BuildValue("nII", (Py_ssize_t)place->offset, place->width, place->stride) : Py_NewRef(Py_None);
}

static PyObject *place_list(const struct place *const *places, Py_ssize_t n)
{
    PyObject *list = PyList_New(n);
    for (Py_ssize_t i = 0; list && i < n; i++) {
        PyObject *tuple = place_tuple(places[i]);
        if (!tuple || PyList_SetItem(list, i, tuple))
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *step_dict(const struct plan *plan, const struct program *program, uint32_t index)
{
    char text[256];
    const struct step *s = &plan->steps[index];
    const struct place *in[OP_INPUTS + 1], *out[] = {&s->out, &s->mid, &s->normed, &s->next};
    for (uint32_t i = 0; i < OP_INPUTS; i++)
        in[i] = &s->in[i];
    in[OP_INPUTS] = &s->add;
    if (!plan_step_text(plan, program, index, text, sizeof text))
        return Py_BuildValue("{}");
    return Py_BuildValue("{s:s,s:N,s:N,s:O}", "text", text, "reads", place_list(in, OP_INPUTS + 1), "writes",
                         place_list(out, sizeof out / sizeof *out), "on_selected", s->on_selected ? Py_True : Py_False);
}

static PyObject *plan_list(const struct plan *plan, const struct program *program)
{
    PyObject *steps = PyList_New(0);
    for (uint32_t i = 0; steps && i < plan->n_steps; i++) {
        PyObject *step = step_dict(plan, program, i);
        if (!step || PyList_Append(steps, step) < 0)
            Py_CLEAR(steps);
        Py_XDECREF(step);
    }
    return steps;
}

PyObject *py_plan(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *spec;
    unsigned fusions, max_rows;
    int has_qkv;
    if (!PyArg_ParseTuple(args, "OIpI", &spec, &fusions, &has_qkv, &max_rows))
        return NULL;
    struct program *program = py_program_parse(spec);
    if (!program)
        return NULL;
    struct plan plan = {0};
    struct err err = {0};
    enum rc rc = program_check(program, &err);
    if (!rc)
        rc = plan_make(program, fusions, has_qkv, max_rows, &plan, &err);
    PyObject *steps = rc ? py_raise(&err) : plan_list(&plan, program);
    PyObject *result = steps ? Py_BuildValue("nN", (Py_ssize_t)plan.arena_values, steps) : NULL;
    plan_clear(&plan);
    program_destroy(program);
    return result;
}
