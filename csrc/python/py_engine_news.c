/* py_engine_news.c: makes Python dictionaries of news (what requests produced). Arrays become bytes, copied once. */
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

static PyObject *logprobs_of(const struct news *news)
{
    if (!news->results)
        return Py_NewRef(Py_None);
    return Py_BuildValue("(NNNNN)", COLUMN(news->results, news->n_new, raw), COLUMN(news->results, news->n_new, full),
                         COLUMN(news->results, news->n_new, processed), COLUMN(news->results, news->n_new, kept_mass),
                         COLUMN(news->results, news->n_new, rank));
}

static PyObject *top_of(const int32_t *ids, const float *values, const int32_t *ranks, size_t n)
{
    return Py_BuildValue("(NNN)", bytes_of(ids, n, sizeof *ids), bytes_of(values, n, sizeof *values),
                         bytes_of(ranks, n, sizeof *ranks));
}

static PyObject *news_top(const struct news *news)
{
    if (!news->results)
        return Py_NewRef(Py_None);
    return top_of(news->top_ids, news->top_values, news->top_ranks, (size_t)news->n_new * news->n_logprobs);
}

/* `full` serves scoring and prompt logprobs: at temperature 1 and without biases it has the bits of `raw`. */
static PyObject *prompt_logprobs_of(const struct news *news)
{
    if (!news->prompt_results)
        return Py_NewRef(Py_None);
    return Py_BuildValue("(NN)", COLUMN(news->prompt_results, news->n_prompt_results, full),
                         COLUMN(news->prompt_results, news->n_prompt_results, rank));
}

static PyObject *prompt_top_of(const struct news *news)
{
    if (!news->prompt_results)
        return Py_NewRef(Py_None);
    return top_of(news->prompt_top_ids, news->prompt_top_values, news->prompt_top_ranks,
                  (size_t)news->n_prompt_results * news->n_prompt_logprobs);
}

/* ((tokens, epoch), ...): runs of tokens from the same weights. */
static PyObject *epochs_of(const struct news *news)
{
    PyObject *list = PyList_New(0), *result = NULL;
    for (uint32_t i = 0, end; list && i < news->n_new; i = end) {
        for (end = i + 1; end < news->n_new && news->epochs[end] == news->epochs[i];)
            end++;
        PyObject *run = Py_BuildValue("(II)", end - i, news->epochs[i]);
        if (!run || PyList_Append(list, run) < 0)
            Py_CLEAR(list);
        Py_XDECREF(run);
    }
    if (list)
        result = PyList_AsTuple(list);
    Py_XDECREF(list);
    return result;
}

static PyObject *states_of(const struct news *news)
{
    if (!news->states)
        return Py_NewRef(Py_None);
    return bytes_of(news->states, (size_t)news->n_states * news->states_width, sizeof *news->states);
}

static PyObject *error_of(const struct news *news)
{
    if (!news->error)
        return Py_NewRef(Py_None);
    return PyUnicode_DecodeUTF8(news->error, (Py_ssize_t)strlen(news->error), "replace"); /* it may end inside a character */
}

PyObject *py_news(const struct news *news)
{
    return Py_BuildValue(
        "{sKsIszsisIsNsIsIsNsNsNsNsNsIsIsIsNs(dddd)sNsN}",
        "request", (unsigned long long)news->request,
        "sample", news->sample,
        "finish", py_finish_name(news->finish),
        "stop", (int)news->stop,
        "status", news->status,
        "error", error_of(news),
        "error_position", news->error_position,
        "first", news->first,
        "ids", bytes_of(news->ids, news->n_new, sizeof *news->ids),
        "logprobs", logprobs_of(news),
        "top", news_top(news),
        "prompt_logprobs", prompt_logprobs_of(news),
        "prompt_top", prompt_top_of(news),
        "num_cached_tokens", news->n_cached_tokens,
        "num_preemptions", news->n_preemptions,
        "epoch", news->epoch,
        "epochs", epochs_of(news),
        "times", news->queued, news->scheduled, news->first_token, news->last_token,
        "is_last", PyBool_FromLong(news->is_last_of_request),
        "states", states_of(news));
}

PyObject *py_more(const struct news *news)
{
    uint32_t n = news->n_new;
    size_t n_top = (size_t)n * news->n_logprobs;
    PyObject *ids = bytes_of(news->ids, n, sizeof *news->ids), *columns;
    if (!news->results)
        columns = Py_BuildValue("(N)", ids);
    else
        columns = Py_BuildValue("(NNNNNNNNN)", ids, COLUMN(news->results, n, raw), COLUMN(news->results, n, full),
                                COLUMN(news->results, n, processed), COLUMN(news->results, n, kept_mass),
                                COLUMN(news->results, n, rank), bytes_of(news->top_ids, n_top, sizeof *news->top_ids),
                                bytes_of(news->top_values, n_top, sizeof *news->top_values),
                                bytes_of(news->top_ranks, n_top, sizeof *news->top_ranks));
    return Py_BuildValue("(NdII)", columns, news->last_token, news->n_preemptions, news->epoch);
}

int py_append_news(PyObject *list, const struct news *news, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        PyObject *record = py_news(&news[i]);
        int bad = !record || PyList_Append(list, record) < 0;
        Py_XDECREF(record);
        if (bad)
            return -1;
    }
    return 0;
}
