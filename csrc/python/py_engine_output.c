/* py_engine_output.c: makes Python dictionaries of output (what requests produced). Arrays become bytes, copied once. */
#include "py_engine.h"

#include <string.h>

static const char *const FINISHES[] = {
    [FINISH_NONE] = NULL,
    [FINISH_EOS] = "eos",
    [FINISH_STOP_ID] = "stop_id",
    [FINISH_STOP_STRING] = "stop_string",
    [FINISH_GRAMMAR] = "grammar",
    [FINISH_LENGTH] = "length",
    [FINISH_ABORT] = "abort",
    [FINISH_ERROR] = "error",
};

const char *py_finish_name(enum finish finish)
{
    return FINISHES[finish];
}

static PyObject *bytes_of(const void *data, size_t count, size_t size_bytes)
{
    return PyBytes_FromStringAndSize(data, (Py_ssize_t)(count * size_bytes));
}

/* One field of all results, as the bytes of an array. */
static PyObject *column(const struct sample_result *results, uint32_t n, size_t offset)
{
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)n * 4);
    char *target = bytes ? PyBytes_AsString(bytes) : NULL;
    for (uint32_t i = 0; target && i < n; i++)
        memcpy(target + (size_t)i * 4, (const char *)&results[i] + offset, 4);
    return bytes;
}

#define COLUMN(results, n, field) column(results, n, offsetof(struct sample_result, field))

static PyObject *logprobs_of(const struct output *output)
{
    if (!output->results)
        return Py_NewRef(Py_None);
    return Py_BuildValue("(NNNNN)", COLUMN(output->results, output->n_new, raw), COLUMN(output->results, output->n_new, full),
                         COLUMN(output->results, output->n_new, processed), COLUMN(output->results, output->n_new, kept_mass),
                         COLUMN(output->results, output->n_new, rank));
}

static PyObject *top_of(const int32_t *ids, const float *values, const int32_t *ranks, size_t n)
{
    return Py_BuildValue("(NNN)", bytes_of(ids, n, sizeof *ids), bytes_of(values, n, sizeof *values),
                         bytes_of(ranks, n, sizeof *ranks));
}

static PyObject *output_top(const struct output *output)
{
    if (!output->results)
        return Py_NewRef(Py_None);
    return top_of(output->top_ids, output->top_values, output->top_ranks, (size_t)output->n_new * output->n_logprobs);
}

/* `full` serves scoring and prompt logprobs: at temperature 1 and without biases it has the bits of `raw`. */
static PyObject *prompt_logprobs_of(const struct output *output)
{
    if (!output->prompt_results)
        return Py_NewRef(Py_None);
    return Py_BuildValue("(NN)", COLUMN(output->prompt_results, output->n_prompt_results, full),
                         COLUMN(output->prompt_results, output->n_prompt_results, rank));
}

static PyObject *prompt_top_of(const struct output *output)
{
    if (!output->prompt_results)
        return Py_NewRef(Py_None);
    return top_of(output->prompt_top_ids, output->prompt_top_values, output->prompt_top_ranks,
                  (size_t)output->n_prompt_results * output->n_prompt_logprobs);
}

/* ((tokens, epoch), ...): runs of tokens from the same weights. */
static PyObject *epochs_of(const struct output *output)
{
    PyObject *list = PyList_New(0), *result = NULL;
    for (uint32_t i = 0, end; list && i < output->n_new; i = end) {
        for (end = i + 1; end < output->n_new && output->epochs[end] == output->epochs[i];)
            end++;
        PyObject *run = Py_BuildValue("(II)", end - i, output->epochs[i]);
        if (!run || PyList_Append(list, run) < 0)
            Py_CLEAR(list);
        Py_XDECREF(run);
    }
    if (list)
        result = PyList_AsTuple(list);
    Py_XDECREF(list);
    return result;
}

static PyObject *states_of(const struct output *output)
{
    if (!output->states)
        return Py_NewRef(Py_None);
    return bytes_of(output->states, (size_t)output->n_states * output->states_width, sizeof *output->states);
}

static PyObject *error_of(const struct output *output)
{
    if (!output->error)
        return Py_NewRef(Py_None);
    /* the text may end inside a character */
    return PyUnicode_DecodeUTF8(output->error, (Py_ssize_t)strlen(output->error), "replace");
}

/* (drafts, accepted) by place, as the bytes of arrays; None: the sample could have no drafts, or has not finished. */
static PyObject *drafts_of(const struct output *output)
{
    if (!output->drafts)
        return Py_NewRef(Py_None);
    const struct draft_counts *counts = output->drafts;
    return Py_BuildValue("(NN)", bytes_of(counts->proposed, MAX_DRAFTS, sizeof *counts->proposed),
                         bytes_of(counts->accepted, MAX_DRAFTS, sizeof *counts->accepted));
}

PyObject *py_output(const struct output *output)
{
    return Py_BuildValue(
        "{sKsIszsisIsNsIsIsNsNsNsNsNsIsIsIsIsNs(dddd)sNsNsN}",
        "request", (unsigned long long)output->request,
        "sample", output->sample,
        "finish", py_finish_name(output->finish),
        "stop", (int)output->stop,
        "status", output->status,
        "error", error_of(output),
        "error_position", output->error_position,
        "first", output->first,
        "ids", bytes_of(output->ids, output->n_new, sizeof *output->ids),
        "logprobs", logprobs_of(output),
        "top", output_top(output),
        "prompt_logprobs", prompt_logprobs_of(output),
        "prompt_top", prompt_top_of(output),
        "num_cached_tokens", output->n_cached_tokens,
        "num_cached_images", output->n_cached_items,
        "num_preemptions", output->n_preemptions,
        "epoch", output->epoch,
        "epochs", epochs_of(output),
        "times", output->queued, output->scheduled, output->first_token, output->last_token,
        "is_last", PyBool_FromLong(output->is_last_of_request),
        "states", states_of(output),
        "drafts", drafts_of(output));
}

PyObject *py_more(const struct output *output)
{
    uint32_t n = output->n_new;
    size_t n_top = (size_t)n * output->n_logprobs;
    PyObject *ids = bytes_of(output->ids, n, sizeof *output->ids), *columns;
    if (!output->results)
        columns = Py_BuildValue("(N)", ids);
    else
        columns = Py_BuildValue("(NNNNNNNNN)", ids, COLUMN(output->results, n, raw), COLUMN(output->results, n, full),
                                COLUMN(output->results, n, processed), COLUMN(output->results, n, kept_mass),
                                COLUMN(output->results, n, rank), bytes_of(output->top_ids, n_top, sizeof *output->top_ids),
                                bytes_of(output->top_values, n_top, sizeof *output->top_values),
                                bytes_of(output->top_ranks, n_top, sizeof *output->top_ranks));
    return Py_BuildValue("(NdII)", columns, output->last_token, output->n_preemptions, output->epoch);
}

int py_append_outputs(PyObject *list, const struct output *output, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        PyObject *record = py_output(&output[i]);
        int bad = !record || PyList_Append(list, record) < 0;
        Py_XDECREF(record);
        if (bad)
            return -1;
    }
    return 0;
}
