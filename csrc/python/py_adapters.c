/* py_adapters.c: the methods of _core.Model for adapters (LoRA). */
#define PY_SSIZE_T_CLEAN
#include "py.h"

#include "../base/mem.h"
#include "../program/lora.h"
#include "../program/team.h"

/* The experts of a matrix; zeros: the matrix is a linear's. */
static struct held_experts experts_of(const struct program *p, uint32_t weight)
{
    for (uint32_t i = 0; i < p->n_ops; i++) {
        const struct op *op = &p->ops[i];
        if (lora_held(op).n && (op->weight[0] == weight || (op->code == OP_EXPERTS && op->weight[1] == weight)))
            return lora_held(op);
    }
    return (struct held_experts){0};
}

/* (tensor, its rows, rows of the part, columns, base, inner, stride, offsets of head, a, b and bias, number of the matrix, its
 * experts, that of the part, use, whether a matrix may stand in its place, bytes of a value of A and B); struct weight_part has
 * the meaning of base, inner and stride. Offset of bias 0: there is no room for one. */
static PyObject *place_of(const struct program *p, const struct lora *lora, const struct lora_place *place)
{
    Py_ssize_t at = (Py_ssize_t)lora->image_offset;
    const struct weight *weight = &p->weights[place->weight];
    const struct weight_part *part = &weight->parts[place->part];
    uint32_t last = part->n_dims - 1, tensor_rows = part->is_transposed ? part->dims[last] : 1;
    uint32_t base = part->base, inner = part->inner, stride = part->stride;
    for (uint32_t i = 0; i < last && !part->is_transposed; i++)
        tensor_rows *= part->dims[i];
    if (place->use == LORA_EMBEDDING) {
        tensor_rows = inner = place->at.n_rows;
        base = stride = 0;
    }
    bool has_bias = lora->has_biases && place->use != LORA_EMBEDDING;
    struct held_experts held = experts_of(p, place->weight);
    return Py_BuildValue("(sIIIIIInnnnIIIIiI)", part->name, tensor_rows, place->at.n_rows, place->n_cols, base, inner, stride,
                         at + (Py_ssize_t)place->at.head, at + (Py_ssize_t)place->at.a, at + (Py_ssize_t)place->at.b,
                         has_bias ? at + (Py_ssize_t)place->bias : 0, place->weight, held.n,
                         held.n ? held.first + place->part / (weight->n_parts / held.n_held) : 0, (uint32_t)place->use,
                         lora->has_whole, place->item_bytes);
}

static const struct lora *lora_of(PyObject *object, struct team **team)
{
    *team = py_model_borrow(object);
    return *team ? model_lora(team_model(*team, 0)) : NULL;
}

/* Appends the places of a rank's parts. */
static int add_places(PyObject *list, const struct model *model)
{
    const struct lora *lora = model_lora(model);
    int bad = 0;
    for (uint32_t i = 0; i < lora->n_places && !bad; i++) {
        PyObject *place = place_of(model_program(model), lora, &lora->places[i]);
        bad = place ? PyList_Append(list, place) : -1;
        Py_XDECREF(place);
    }
    return bad;
}

/* The bytes of an image, and the places of its parts in each rank. */
PyObject *py_adapter_places(PyObject *object, PyObject *unused)
{
    struct team *team;
    const struct lora *lora = lora_of(object, &team);
    (void)unused;
    if (!lora)
        return NULL;
    size_t n_bytes = lora->adapters ? adapters_image_bytes(lora->adapters) : 0;
    PyObject *list = PyList_New(0);
    for (uint32_t rank = 0; list && rank < team_n_ranks(team); rank++)
        if (add_places(list, team_model(team, rank)) < 0)
            Py_CLEAR(list);
    py_model_return(object);
    return list ? Py_BuildValue("(nN)", (Py_ssize_t)n_bytes, list) : NULL;
}

/* The model's adapters, for a call with an adapter's number; NULL: a Python error is set. */
static const struct lora *lora_of_number(PyObject *object, PyObject *number, struct team **team, uint64_t *which)
{
    *which = PyLong_AsUnsignedLongLong(number);
    return PyErr_Occurred() ? NULL : lora_of(object, team);
}

/* An adapter whose image lies at an address that its owner keeps. */
PyObject *py_lend_adapter(PyObject *object, PyObject *args)
{
    unsigned long long number, address;
    Py_ssize_t n_bytes;
    int is_pinned;
    struct team *team;
    struct err err;
    if (!PyArg_ParseTuple(args, "KKnp:lend_adapter", &number, &address, &n_bytes, &is_pinned))
        return NULL;
    const struct lora *lora = lora_of(object, &team);
    if (!lora)
        return NULL;
    size_t wanted = lora->adapters ? adapters_image_bytes(lora->adapters) : 0;
    enum rc rc = (size_t)n_bytes == wanted
                     ? adapters_add(lora->adapters, number, (const void *)(uintptr_t)address, is_pinned, &err)
                     : err_set(&err, RC_INTERNAL, "adapter: wanted an image of %zu bytes, have %zd", wanted, n_bytes);
    py_model_return(object);
    return rc ? py_raise(&err) : Py_NewRef(Py_None);
}

PyObject *py_holds_adapter(PyObject *object, PyObject *number)
{
    struct team *team;
    uint64_t which;
    const struct lora *lora = lora_of_number(object, number, &team, &which);
    if (!lora)
        return NULL;
    bool holds = lora->adapters && adapters_hold_number(lora->adapters, which);
    py_model_return(object);
    return PyBool_FromLong(holds);
}

PyObject *py_remove_adapter(PyObject *object, PyObject *number)
{
    struct team *team;
    uint64_t which;
    const struct lora *lora = lora_of_number(object, number, &team, &which);
    if (!lora)
        return NULL;
    if (lora->adapters)
        adapters_remove(lora->adapters, which);
    py_model_return(object);
    Py_RETURN_NONE;
}

/* The numbers of the adapters that sequences run with. */
PyObject *py_running_adapters(PyObject *object, PyObject *unused)
{
    struct team *team;
    const struct lora *lora = lora_of(object, &team);
    (void)unused;
    if (!lora)
        return NULL;
    uint32_t n = lora->n_slots;
    uint64_t *numbers = mem_alloc((n + 1) * sizeof *numbers);
    PyObject *list = numbers ? PyList_New(0) : PyErr_NoMemory();
    n = list && lora->adapters ? adapters_running(lora->adapters, numbers, n) : 0;
    for (uint32_t i = 0; list && i < n; i++) {
        PyObject *number = PyLong_FromUnsignedLongLong(numbers[i]);
        if (!number || PyList_Append(list, number) < 0)
            Py_CLEAR(list);
        Py_XDECREF(number);
    }
    mem_free(numbers);
    py_model_return(object);
    return list;
}
