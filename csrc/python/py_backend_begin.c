/* py_backend_begin.c: Backend.begin. The arrays that an executor keeps on the device are the caller's here: they go there
 * before the call and come back from it. */
#include "py_stage.h"

/* A host array, as the operation reads it; its items are counted. */
static const int32_t *host_array(struct stage *s, const char *name, PyObject *object, size_t *n)
{
    const int32_t *unused;
    *n = stage_array(s, name, object, 'i', false, &unused);
    return s->failed ? NULL : s->buffers[s->n_buffers - 1].buf;
}

static void stage_rows(struct stage *s, PyObject *rows, struct begin_args *a)
{
    PyObject *ids, *positions, *row_seq, *first, *wanted;
    size_t n_rows, n_positions, n_seqs, n_first, n_wanted;
    if (s->failed || !PyArg_ParseTuple(rows, "OOOOO", &ids, &positions, &row_seq, &first, &wanted)) {
        s->failed = true;
        return;
    }
    a->token_ids = host_array(s, "token_ids", ids, &n_rows);
    a->positions = host_array(s, "positions", positions, &n_positions);
    a->row_seq = host_array(s, "row_seq", row_seq, &n_seqs);
    a->seq_first_row = host_array(s, "seq_first_row", first, &n_first);
    a->logits_rows = host_array(s, "logits_rows", wanted, &n_wanted);
    if (!s->failed && (n_positions != n_rows || n_seqs != n_rows || !n_first))
        stage_fail(s, "rows", "as many positions and row_seq as token ids, and a seq_first_row");
    a->n_rows = (uint32_t)n_rows;
    a->n_seqs = (uint32_t)n_first - 1;
    a->n_logits_rows = (uint32_t)n_wanted;
}

static void stage_targets(struct stage *s, PyObject *to, const struct begin_args *a, struct batch_arrays *arrays)
{
    PyObject *objects[5];
    int32_t **targets[] = {&arrays->token_ids, &arrays->positions, &arrays->row_seq, &arrays->seq_first_row,
                           &arrays->logits_rows};
    if (s->failed || !PyArg_ParseTuple(to, "OOOOO", &objects[0], &objects[1], &objects[2], &objects[3], &objects[4])) {
        s->failed = true;
        return;
    }
    for (int i = 0; i < 5; i++)
        if (stage_array(s, "to", objects[i], 'i', true, targets[i]) <= (size_t)a->n_rows + a->n_pad_rows && !s->failed)
            stage_fail(s, "to", "one item more than there are rows");
}

/* begin(slot, rows, tables, runs, to, to_tables, n_pad_rows=0, pad_row_seq=0) */
PyObject *py_backend_begin(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"slot", "rows", "tables", "runs", "to", "to_tables", "n_pad_rows", "pad_row_seq", NULL};
    PyObject *rows, *tables, *runs, *to, *to_tables;
    struct begin_args a = {0};
    struct stage s;
    size_t n_entries, n_runs;
    stage_open(&s, object);
    if (!s.self->table->begin)
        return PyErr_Format(PyExc_NotImplementedError, "this backend reads a batch where it is");
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "IOOOOO|II", names, &a.slot, &rows, &tables, &runs, &to, &to_tables,
                                     &a.n_pad_rows, &a.pad_row_seq))
        return NULL;
    stage_rows(&s, rows, &a);
    stage_targets(&s, to, &a, &a.to);
    a.tables = host_array(&s, "tables", tables, &n_entries);
    a.runs = (const struct table_run *)(const void *)host_array(&s, "runs", runs, &n_runs);
    a.n_runs = (uint32_t)n_runs / 2;
    if (stage_array(&s, "to_tables", to_tables, 'i', true, &a.to.tables) != n_entries && !s.failed)
        stage_fail(&s, "to_tables", "as many entries as tables");
    for (uint32_t i = 0; i < a.n_runs && !s.failed; i++)
        if ((size_t)a.runs[i].first + a.runs[i].count > n_entries)
            stage_fail(&s, "runs", "runs of entries");
    STAGE_RUN(&s, begin, &a);
}
