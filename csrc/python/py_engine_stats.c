/* py_engine_stats.c: makes Python objects of an engine's statistics. */
#define PY_SSIZE_T_CLEAN
#include "py_engine.h"

#include <stdio.h>

static int set(PyObject *dict, const char *name, PyObject *value)
{
    int result = value ? PyDict_SetItemString(dict, name, value) : -1;
    Py_XDECREF(value);
    return result;
}

PyObject *py_stats(const struct engine_stats *s)
{
    const struct {
        const char *name;
        uint64_t value;
    } counts[] = {
        {"num_running", s->num_running},
        {"num_waiting", s->num_waiting},
        {"num_held", s->num_held},
        {"num_compiling", s->num_compiling},
        {"num_unfinished", s->num_unfinished},
        {"num_preemptions", s->num_preemptions},
        {"num_mixed_preemptions", s->num_mixed_preemptions},
        {"num_swaps", s->num_swaps},
        {"blocks_swapped_out", s->blocks_swapped_out},
        {"blocks_swapped_in", s->blocks_swapped_in},
        {"num_steps", s->num_steps},
        {"prompt_tokens", s->prompt_tokens},
        {"cached_tokens", s->cached_tokens},
        {"generation_tokens", s->generation_tokens},
        {"prefix_cache_queries", s->prefix_cache_queries},
        {"prefix_cache_hits", s->prefix_cache_hits},
        {"prompt_rows", s->prompt_rows},
        {"decode_rows", s->decode_rows},
        {"redone_rows", s->redone_rows},
        {"wasted_rows", s->wasted_rows},
        {"draft_rows", s->draft_rows},
        {"accepted_rows", s->accepted_rows},
        {"num_draft_waits", s->num_draft_waits},
        {"num_replayed_steps", s->num_replayed_steps},
        {"max_steps_in_flight", s->max_steps_in_flight},
        {"kv_blocks_total", s->kv_blocks_total},
        {"kv_blocks_free", s->kv_blocks_free},
        {"kv_blocks_cached", s->kv_blocks_cached},
        {"evictions", s->evictions},
        {"host_blocks_total", s->host_blocks_total},
        {"host_blocks_cached", s->host_blocks_cached},
        {"host_blocks_swapped", s->host_blocks_swapped},
        {"host_cache_hits", s->host_cache_hits},
        {"skipped_loads", s->skipped_loads},
        {"skipped_load_tokens", s->skipped_load_tokens},
        {"host_stored_bytes", s->host_stored_bytes},
        {"host_loaded_bytes", s->host_loaded_bytes},
        {"disk_blocks_cached", s->disk_blocks_cached},
        {"disk_bytes", s->disk_bytes},
        {"disk_cache_queries", s->disk_cache_queries},
        {"disk_cache_hits", s->disk_cache_hits},
        {"disk_stored_bytes", s->disk_stored_bytes},
        {"disk_loaded_bytes", s->disk_loaded_bytes},
        {"disk_misses", s->disk_misses},
        {"disk_bad_files", s->disk_bad_files},
        {"disk_errors", s->disk_errors},
        {"disk_evictions", s->disk_evictions},
        {"host_queued_bytes", s->host_queued_bytes},
        {"disk_queued_blocks", s->disk_queued_blocks},
        {"fetched_tokens", s->fetched_tokens},
        {"fetched_bytes", s->fetched_bytes},
        {"state_snapshots", s->state_snapshots},
        {"state_snapshot_bytes", s->state_snapshot_bytes},
        {"state_snapshots_taken", s->state_snapshots_taken},
        {"images_encoded", s->images_encoded},
        {"image_pieces", s->image_pieces},
        {"image_rows", s->image_rows},
        {"image_cache_hits", s->image_cache_hits},
        {"image_cache_evictions", s->image_cache_evictions},
        {"images_reencoded", s->images_reencoded},
        {"weight_epoch", s->weight_epoch},
        {"sleep_level", s->sleep_level},
        {"nonfinite_rows", s->nonfinite_rows},
        {"num_masks", s->num_masks},
        {"mask_us", s->mask_us},
        {"allocations_since_warmup", s->allocations_since_warmup},
    };
    PyObject *dict = Py_BuildValue("{sdsdsdsdsdsdsdsd}", "host_store_s", s->host_store_s, "host_load_s", s->host_load_s,
                                   "disk_store_s", s->disk_store_s, "disk_load_s", s->disk_load_s,
                                   "fetch_s", s->fetch_s,
                                   "last_step_ms", s->last_step_ms, "last_host_us", s->last_host_us, "uptime_s", s->uptime_s);
    int bad = !dict;
    for (size_t i = 0; i < sizeof counts / sizeof *counts && !bad; i++)
        bad = set(dict, counts[i].name, PyLong_FromUnsignedLongLong(counts[i].value));
    for (int how = FINISH_NONE + 1; how < N_FINISHES && !bad; how++) {
        char name[32];
        snprintf(name, sizeof name, "finished_%s", py_finish_name((enum finish)how));
        bad = set(dict, name, PyLong_FromUnsignedLongLong(s->finished[how]));
    }
    for (unsigned place = 0; place < MAX_DRAFTS && !bad; place++) {
        char drafts[32], accepted[32];
        snprintf(drafts, sizeof drafts, "drafts_%u", place);
        snprintf(accepted, sizeof accepted, "accepted_drafts_%u", place);
        bad = set(dict, drafts, PyLong_FromUnsignedLongLong(s->drafts[place])) |
              set(dict, accepted, PyLong_FromUnsignedLongLong(s->accepted_drafts[place]));
    }
    if (bad)
        Py_CLEAR(dict);
    return dict;
}

static PyObject *step_tuple(uint64_t number, const struct step_record *s)
{
    return Py_BuildValue("(KdddIIIIIIIIIIIIIIIIII)", (unsigned long long)number, s->start, (double)s->host_us,
                         (double)s->device_us, s->n_rows, s->n_prompt, s->n_decode, s->n_redone, s->n_wasted, s->n_draft,
                         s->n_tokens, s->n_accepted, s->n_admitted, s->n_preempted, s->n_running, s->n_waiting,
                         s->n_pages_used, s->n_pages_cached, s->n_in_flight, s->is_replayed, s->n_pieces,
                         s->n_piece_rows);
}

PyObject *py_step_log(struct engine *engine, uint32_t max)
{
    max = max < STEP_LOG_LENGTH ? max : STEP_LOG_LENGTH;
    PyObject *memory = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(max * sizeof(struct step_record)));
    if (!memory) /* Python's heap, since mem_alloc would count as an allocation of a step that runs now */
        return NULL;
    struct step_record *steps = (struct step_record *)(void *)PyBytes_AsString(memory);
    uint64_t first;
    uint32_t n = engine_step_log(engine, steps, max, &first);
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; i < n && list; i++) {
        PyObject *step = step_tuple(first + i, &steps[i]);
        if (!step || PyList_Append(list, step) < 0)
            Py_CLEAR(list);
        Py_XDECREF(step);
    }
    Py_DECREF(memory);
    return list;
}

static PyObject *kv_event_tuple(const struct kv_event *e, const int32_t *ids, uint32_t block_tokens)
{
    PyObject *parent = e->has_parent ? PyLong_FromUnsignedLongLong(e->parent) : Py_NewRef(Py_None);
    return Py_BuildValue("(KIKNIy#y#y#KI)", (unsigned long long)e->number, e->kind, (unsigned long long)e->hash, parent,
                         e->group, (const char *)ids, (Py_ssize_t)(e->kind == KV_STORED ? block_tokens * sizeof *ids : 0),
                         e->salt, (Py_ssize_t)e->n_salt, (const char *)e->images, (Py_ssize_t)(e->n_images * sizeof *e->images),
                         (unsigned long long)e->adapter, e->pool);
}

PyObject *py_kv_events(struct engine *engine, uint64_t next)
{
    enum { AT_ONCE = 64 };
    uint32_t block_tokens = engine_block_tokens(engine), n;
    struct kv_event events[AT_ONCE];
    int32_t ids[AT_ONCE * MAX_BLOCK_TOKENS];
    PyObject *list = PyList_New(0);
    n = engine_kv_events(engine, &next, events, ids, AT_ONCE);
    for (uint32_t i = 0; i < n && list; i++) {
        PyObject *event = kv_event_tuple(&events[i], &ids[i * block_tokens], block_tokens);
        if (!event || PyList_Append(list, event) < 0)
            Py_CLEAR(list);
        Py_XDECREF(event);
    }
    return list ? Py_BuildValue("(KN)", (unsigned long long)next, list) : NULL;
}

static PyObject *histogram_tuple(enum histogram_name name, const struct histogram *histogram)
{
    PyObject *bounds = PyTuple_New(N_BOUNDS), *counts = PyTuple_New(N_BOUNDS + 1);
    int bad = !bounds || !counts;
    for (Py_ssize_t i = 0; i < N_BOUNDS && !bad; i++) {
        PyObject *bound = PyFloat_FromDouble(histogram_bounds(name)[i]);
        bad = !bound || PyTuple_SetItem(bounds, i, bound) < 0;
    }
    for (Py_ssize_t i = 0; i <= N_BOUNDS && !bad; i++) {
        PyObject *count = PyLong_FromUnsignedLongLong(histogram->counts[i]);
        bad = !count || PyTuple_SetItem(counts, i, count) < 0;
    }
    if (!bad)
        return Py_BuildValue("(NNd)", bounds, counts, histogram->sum);
    Py_XDECREF(bounds);
    Py_XDECREF(counts);
    return NULL;
}

PyObject *py_histograms(struct engine *engine)
{
    struct histogram histograms[N_HISTOGRAMS];
    engine_histograms(engine, histograms);
    PyObject *dict = PyDict_New();
    for (int i = 0; i < N_HISTOGRAMS && dict; i++)
        if (set(dict, histogram_title((enum histogram_name)i), histogram_tuple((enum histogram_name)i, &histograms[i])) < 0)
            Py_CLEAR(dict);
    return dict;
}
