/* py_backend_sample.c: Backend.sample. A task is a dict whose keys are the fields of struct sample_task (its lists as Python
 * lists); a result is (id, status, raw, full, processed, kept_mass, rank, [(id, value, rank), ...]). */
#include "py_stage.h"

#include "../base/mem.h"

#include <string.h>

/* Everything that lives as long as one call. */
struct sampling {
    struct sample_task *tasks;
    struct sample_result *results;
    void *lists;          /* the tasks' lists, one after the other */
    size_t used, size_bytes;
    int32_t *top_ids, *top_ranks;
    float *top_values;
    uint32_t n_top;
};

static void sampling_free(struct sampling *s)
{
    mem_free(s->tasks);
    mem_free(s->results);
    mem_free(s->lists);
    mem_free(s->top_ids);
    mem_free(s->top_ranks);
    mem_free(s->top_values);
}

static double task_number(PyObject *task, const char *key, double missing)
{
    PyObject *value = PyDict_GetItemString(task, key);
    return value ? PyFloat_AsDouble(value) : missing;
}

static uint64_t task_int(PyObject *task, const char *key)
{
    PyObject *value = PyDict_GetItemString(task, key);
    return value ? PyLong_AsUnsignedLongLongMask(value) : 0;
}

static uint32_t task_count(PyObject *task, const char *key)
{
    PyObject *list = PyDict_GetItemString(task, key);
    return list ? (uint32_t)PySequence_Size(list) : 0;
}

static void *sampling_room(struct sampling *s, size_t n_bytes)
{
    char *room = (char *)s->lists + s->used;
    s->used += (n_bytes + 7) / 8 * 8;
    return room;
}

/* A list of ids. */
static const int32_t *task_ids(struct sampling *s, PyObject *task, const char *key, uint32_t *n)
{
    *n = task_count(task, key);
    int32_t *ids = sampling_room(s, *n * sizeof *ids);
    for (uint32_t i = 0; i < *n; i++) {
        PyObject *item = PySequence_GetItem(PyDict_GetItemString(task, key), i);
        ids[i] = item ? (int32_t)PyLong_AsLong(item) : 0;
        Py_XDECREF(item);
    }
    return ids;
}

static const struct token_bias *task_bias(struct sampling *s, PyObject *task, uint32_t *n)
{
    *n = task_count(task, "bias");
    struct token_bias *bias = sampling_room(s, *n * sizeof *bias);
    for (uint32_t i = 0; i < *n; i++) {
        PyObject *item = PySequence_GetItem(PyDict_GetItemString(task, "bias"), i);
        if (!item || !PyArg_ParseTuple(item, "if", &bias[i].id, &bias[i].value))
            *n = 0;
        Py_XDECREF(item);
    }
    return bias;
}

static const struct token_seen *task_seen(struct sampling *s, PyObject *task, uint32_t *n)
{
    *n = task_count(task, "seen");
    struct token_seen *seen = sampling_room(s, *n * sizeof *seen);
    for (uint32_t i = 0; i < *n; i++) {
        PyObject *item = PySequence_GetItem(PyDict_GetItemString(task, "seen"), i);
        if (!item || !PyArg_ParseTuple(item, "iII", &seen[i].id, &seen[i].count, &seen[i].in_prompt))
            *n = 0;
        Py_XDECREF(item);
    }
    return seen;
}

static void task_parse(struct sampling *s, PyObject *dict, struct sample_task *task)
{
    task->logits_row = (uint32_t)task_int(dict, "logits_row");
    task->is_score = task_int(dict, "is_score");
    task->is_greedy = task_int(dict, "is_greedy");
    task->wants_logprobs = task_int(dict, "wants_logprobs");
    task->target = (int32_t)task_int(dict, "target");
    task->temperature = (float)task_number(dict, "temperature", 1);
    task->top_p = (float)task_number(dict, "top_p", 1);
    task->min_p = (float)task_number(dict, "min_p", 0);
    task->top_k = (uint32_t)task_int(dict, "top_k");
    task->repetition_penalty = (float)task_number(dict, "repetition_penalty", 1);
    task->presence_penalty = (float)task_number(dict, "presence_penalty", 0);
    task->frequency_penalty = (float)task_number(dict, "frequency_penalty", 0);
    task->seed = task_int(dict, "seed");
    task->sample_index = (uint32_t)task_int(dict, "sample_index");
    task->position = (uint32_t)task_int(dict, "position");
    task->mode = (uint32_t)task_int(dict, "mode");
    task->n_top = (uint32_t)task_int(dict, "n_top");
    task->top_offset = s->n_top;
    s->n_top += task->n_top;
    task->bias = task_bias(s, dict, &task->n_bias);
    task->seen = task_seen(s, dict, &task->n_seen);
    task->banned = task_ids(s, dict, "banned", &task->n_banned);
    task->allowed = task_ids(s, dict, "allowed", &task->n_allowed);
    uint32_t n_words;
    const int32_t *words = task_ids(s, dict, "mask", &n_words);
    task->mask = n_words ? (const uint32_t *)words : NULL;
}

/* Room for the lists of all tasks, for tasks and results. */
static int sampling_size(struct sampling *s, PyObject *list, Py_ssize_t n)
{
    size_t n_top = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *dict = PyList_GetItem(list, i);
        if (!dict || !PyDict_Check(dict)) {
            PyErr_SetString(PyExc_TypeError, "tasks: wanted a list of dicts");
            return -1;
        }
        s->size_bytes += 64 + task_count(dict, "bias") * sizeof(struct token_bias) +
                         task_count(dict, "seen") * sizeof(struct token_seen) +
                         4ul * (task_count(dict, "banned") + task_count(dict, "allowed") + task_count(dict, "mask"));
        n_top += task_int(dict, "n_top");
    }
    s->tasks = mem_calloc((size_t)n, sizeof *s->tasks);
    s->results = mem_calloc((size_t)n, sizeof *s->results);
    s->lists = mem_alloc(s->size_bytes);
    s->top_ids = mem_alloc(n_top * 4);
    s->top_ranks = mem_alloc(n_top * 4);
    s->top_values = mem_alloc(n_top * 4);
    if (s->tasks && s->results && s->lists && s->top_ids && s->top_ranks && s->top_values)
        return 0;
    PyErr_NoMemory();
    return -1;
}

static PyObject *result_make(const struct sampling *s, Py_ssize_t i)
{
    const struct sample_result *r = &s->results[i];
    const struct sample_task *task = &s->tasks[i];
    PyObject *top = PyList_New(0);
    for (uint32_t j = task->top_offset; top && j < task->top_offset + task->n_top; j++) {
        PyObject *item = Py_BuildValue("ifi", s->top_ids[j], (double)s->top_values[j], s->top_ranks[j]);
        if (!item || PyList_Append(top, item) < 0)
            Py_CLEAR(top);
        Py_XDECREF(item);
    }
    if (!top)
        return NULL;
    return Py_BuildValue("iIffffiN", r->id, r->status, (double)r->raw, (double)r->full, (double)r->processed,
                         (double)r->kept_mass, r->rank, top);
}

static PyObject *results_make(const struct sampling *s, Py_ssize_t n)
{
    PyObject *list = PyList_New(0);
    for (Py_ssize_t i = 0; list && i < n; i++) {
        PyObject *item = result_make(s, i);
        if (!item || PyList_Append(list, item) < 0)
            Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

/* One call a slot, all on their way before the first is finished: the first half of the tasks in slot 0, the rest in slot 1. */
static enum rc sample_slots(struct backend_object *self, struct sample_args a, uint32_t n_slots, struct err *err)
{
    const struct sample_args all = a;
    enum rc rc = RC_OK;
    for (uint32_t slot = 0; slot < n_slots && !rc; slot++) {
        a.slot = slot;
        a.first_task = all.n_tasks * slot / n_slots;
        a.n_tasks = all.n_tasks * (slot + 1) / n_slots - a.first_task;
        a.tasks = all.tasks + a.first_task;
        a.results = all.results + a.first_task;
        rc = self->table->sample(self->ctx, &a, err);
    }
    for (uint32_t slot = 0; slot < n_slots && self->table->sample_finish; slot++) {
        enum rc finished = self->table->sample_finish(self->ctx, slot, err);
        rc = rc ? rc : finished;
    }
    return rc;
}

/* sample(logits float32 [rows, vocab], tasks, vocab_limit=0 (all), banned=None (int32 array), slots=1) */
PyObject *py_backend_sample(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"logits", "tasks", "vocab_limit", "banned", "slots", NULL};
    PyObject *logits, *list, *banned = Py_None;
    uint32_t limit = 0, n_slots = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|IOI", names, &logits, &list, &limit, &banned, &n_slots))
        return NULL;
    if (n_slots < 1 || n_slots > 2)
        return PyErr_Format(PyExc_ValueError, "slots: wanted 1 or 2");
    struct sampling sampling = {0};
    Py_ssize_t n = PyList_Size(list);
    if (n < 0 || sampling_size(&sampling, list, n) < 0) {
        sampling_free(&sampling);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < n; i++)
        task_parse(&sampling, PyList_GetItem(list, i), &sampling.tasks[i]);
    struct stage s;
    struct view view;
    stage_open(&s, object);
    s.item_bytes = sizeof(float);
    s.failed = PyErr_Occurred() != NULL;
    stage_view(&s, "logits", logits, false, &view);
    struct sample_args a = {.vocab_size = view.width, .vocab_stride = view.stride, .n_logits_rows = s.n_rows,
                            .vocab_limit = limit ? limit : view.width, .tasks = sampling.tasks, .n_tasks = (uint32_t)n,
                            .results = sampling.results, .top_ids = sampling.top_ids, .top_values = sampling.top_values,
                            .top_ranks = sampling.top_ranks};
    Py_buffer ids = {0};
    if (!s.failed && banned != Py_None) {
        s.failed = PyObject_GetBuffer(banned, &ids, PyBUF_SIMPLE) < 0;
        a.banned = ids.buf;
        a.n_banned = (uint32_t)(ids.len / 4);
    }
    if (stage_begin(&s)) {
        a.logits = view.data;
        stage_done(&s, sample_slots(s.self, a, n_slots, &s.err));
    }
    if (ids.obj)
        PyBuffer_Release(&ids);
    PyObject *done = stage_end(&s), *results = done ? results_make(&sampling, n) : NULL;
    Py_XDECREF(done);
    sampling_free(&sampling);
    return results;
}
