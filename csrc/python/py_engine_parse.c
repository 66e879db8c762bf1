/* py_engine_parse.c: parses the options of an engine into a struct engine_config. */
#define PY_SSIZE_T_CLEAN
#include "py_connector.h"
#include "py_engine.h"
#include "py_values.h"

#include <string.h>

static int engine_policy(const struct py_item *item, void *place)
{
    static const char *const NAMES[] = {[POLICY_FCFS] = "fcfs", [POLICY_PRIORITY] = "priority"};
    struct engine_config *config = place;
    uint32_t number = parse_name(item->value, NAMES, 2);
    struct err err;
    config->policy = (enum engine_policy)number;
    if (number < 2)
        return 0;
    err_set(&err, RC_CONFIG, "scheduling_policy must be 'fcfs' or 'priority'.");
    err_name(&err, "scheduling_policy", NULL);
    py_raise(&err);
    return -1;
}

static int engine_preemption(const struct py_item *item, void *place)
{
    static const char *const NAMES[] = {[PREEMPTION_AUTO] = "auto", [PREEMPTION_RECOMPUTE] = "recompute",
                                        [PREEMPTION_SWAP] = "swap"};
    struct engine_config *config = place;
    uint32_t number = parse_name(item->value, NAMES, 3);
    config->preemption = (enum preemption)number;
    return number < 3 ? 0 : parse_refuse(item, "'auto', 'recompute' or 'swap'");
}

static int engine_cache_seed(const struct py_item *item, void *place)
{
    struct engine_config *config = place;
    config->has_cache_seed = item->value != Py_None;
    config->cache_seed = config->has_cache_seed ? PyLong_AsUnsignedLongLong(item->value) : 0;
    return config->cache_seed == UINT64_MAX && PyErr_Occurred() ? -1 : 0;
}

/* (path, bytes, fingerprint, whether the folder is shared) */
static int engine_disk_cache(const struct py_item *item, void *place)
{
    struct engine_config *config = place;
    struct disk_options *disk = py_scratch_alloc(item->scratch, 1, sizeof *disk);
    const char *path, *fingerprint;
    unsigned long long bytes;
    Py_ssize_t n_path, n_fingerprint;
    int is_shared;
    if (!disk)
        return -1;
    if (!PyTuple_Check(item->value) ||
        !PyArg_ParseTuple(item->value, "y#Ky#p", &path, &n_path, &bytes, &fingerprint, &n_fingerprint,
                          &is_shared))
        return PyErr_Occurred() ? -1 : parse_refuse(item, "a tuple");
    if (n_fingerprint != DISK_FINGERPRINT || memchr(path, 0, (size_t)n_path))
        return parse_refuse(item, "a path, bytes and a fingerprint of 16 bytes");
    *disk = (struct disk_options){.path = path, .bytes = bytes, .is_shared = is_shared}; /* the tuple outlives engine_create */
    memcpy(disk->fingerprint, fingerprint, DISK_FINGERPRINT);
    config->disk = disk;
    return 0;
}

/* ("peer" or a path, fingerprint, whether other engines know the keys, deadline, (name, value, ..)), text as bytes */
static int engine_library(const struct py_item *item, struct engine_config *config)
{
    struct library_options *library = py_scratch_alloc(item->scratch, 1, sizeof *library);
    const char *fingerprint;
    Py_ssize_t n_fingerprint;
    int is_shared;
    PyObject *words;
    if (!library)
        return -1;
    *library = (struct library_options){0};
    if (!PyArg_ParseTuple(item->value, "yy#pdO!", &library->path, &fingerprint, &n_fingerprint, &is_shared,
                          &library->deadline_s, &PyTuple_Type, &words))
        return -1;
    if (n_fingerprint != LIBRARY_FINGERPRINT || PyTuple_Size(words) % 2)
        return parse_refuse(item, "a path, a fingerprint of 16 bytes, and pairs");
    memcpy(library->fingerprint, fingerprint, LIBRARY_FINGERPRINT);
    library->is_shared = is_shared;
    library->n_pairs = (uint32_t)PyTuple_Size(words) / 2;
    struct connector_pair *pairs = py_scratch_alloc(item->scratch, library->n_pairs + 1, sizeof *pairs);
    if (!pairs)
        return -1;
    for (uint32_t i = 0; i < library->n_pairs; i++) { /* the tuple outlives engine_create */
        pairs[i].name = PyBytes_AsString(PyTuple_GetItem(words, 2 * i));
        pairs[i].value = PyBytes_AsString(PyTuple_GetItem(words, 2 * i + 1));
        if (!pairs[i].name || !pairs[i].value)
            return -1;
    }
    library->pairs = pairs;
    config->library = library;
    return 0;
}

/* A library, or the tuple of py_connector_make. */
static int engine_connector(const struct py_item *item, void *place)
{
    struct engine_config *config = place;
    if (PyTuple_Check(item->value) && PyTuple_Size(item->value) && PyBytes_Check(PyTuple_GetItem(item->value, 0)))
        return engine_library(item, config);
    struct connector *connector = py_scratch_alloc(item->scratch, 1, sizeof *connector);
    if (!connector || py_connector_make(item->value, config->runner.host_slot_bytes, connector) < 0)
        return -1;
    config->connector = connector;
    return 0;
}

static int engine_draft_method(const struct py_item *item, void *place)
{
    static const char *const NAMES[] = {[DRAFT_NONE] = "", [DRAFT_NGRAM] = "ngram", [DRAFT_SUFFIX] = "suffix",
                                        [DRAFT_MODEL] = "draft", [DRAFT_HEAD] = "head", [DRAFT_HEADS] = "heads"};
    struct engine_config *config = place;
    uint32_t number = parse_name(item->value, NAMES, 6);
    config->drafts.method = (enum draft_method)number;
    return number < 6 ? 0 : parse_refuse(item, "'', 'ngram', 'suffix', 'draft', 'head' or 'heads'");
}

/* A tuple of _core.Models; the engine object keeps them alive. */
static int engine_drafter(const struct py_item *item, void *place)
{
    struct engine_config *config = place;
    struct drafter_model *drafter = &config->drafter;
    if (!PyTuple_Check(item->value) || PyTuple_Size(item->value) < 1 || PyTuple_Size(item->value) > (Py_ssize_t)MAX_DRAFTS)
        return parse_refuse(item, "a tuple of 1 to 16 models");
    for (Py_ssize_t i = 0; i < PyTuple_Size(item->value); i++) {
        struct model_parts parts;
        if (py_model_get(PyTuple_GetItem(item->value, i), &parts) < 0)
            return -1;
        drafter->runners[drafter->n_runners++] = parts.runner;
        drafter->layout = parts.layout;
        drafter->n_pages = parts.n_pages;
        drafter->vocab_size = parts.vocab_size;
        drafter->max_model_len = parts.max_model_len;
    }
    return 0;
}

static int engine_draft_shared(const struct py_item *item, void *place)
{
    struct engine_config *config = place;
    long long number;
    int bad = parse_integer(item, &number);
    config->drafts.shared_bytes = (uint64_t)number;
    return bad;
}

static int engine_token_bytes(const struct py_item *item, void *place)
{
    struct engine_config *config = place;
    Py_ssize_t n = PySequence_Size(item->value);
    uint64_t *offsets = n < 0 ? NULL : py_scratch_alloc(item->scratch, (size_t)n + 1, sizeof *offsets);
    if (!offsets)
        return -1;
    void *strings = NULL;
    uint32_t n_strings;
    if (parse_sequence(item, sizeof(struct byte_string), parse_byte_string, &strings, &n_strings) < 0)
        return -1;
    const struct byte_string *tokens = strings;
    offsets[0] = 0;
    for (uint32_t i = 0; i < n_strings; i++)
        offsets[i + 1] = offsets[i] + tokens[i].n;
    char *bytes = py_scratch_alloc(item->scratch, offsets[n_strings], 1);
    if (!bytes)
        return -1;
    for (uint32_t i = 0; i < n_strings; i++)
        memcpy(bytes + offsets[i], tokens[i].bytes, tokens[i].n);
    config->token_bytes = bytes;
    config->token_offsets = offsets;
    config->n_tokens = n_strings;
    return 0;
}

#define LIST(list)                                                       \
    static int engine_##list(const struct py_item *item, void *place)       \
    {                                                                    \
        struct engine_config *config = place;                            \
        struct id_list found = {0};                                      \
        int bad = parse_ids(item, &found);                               \
        config->list##_ids = found.ids;                                  \
        config->n_##list = found.n;                                      \
        return bad;                                                      \
    }
LIST(eos)
LIST(special)
LIST(banned)
#undef LIST

#define FIELD(name, parse, field) {name, parse, offsetof(struct engine_config, field)}
static const struct py_field OPTIONS[] = {
    FIELD("max_logprobs", parse_count, max_logprobs),
    FIELD("kv_event_capacity", parse_count, n_kv_events),
    FIELD("enable_prefix_caching", parse_bool, prefix_caching),
    FIELD("is_serial", parse_bool, is_serial),
    {"draft_method", engine_draft_method, 0},
    FIELD("draft_k", parse_count, drafts.k),
    FIELD("draft_min", parse_count, drafts.min),
    FIELD("draft_max", parse_count, drafts.max),
    {"draft_shared_bytes", engine_draft_shared, 0},
    {"drafter", engine_drafter, 0},
    {"policy", engine_policy, 0},
    {"preemption", engine_preemption, 0},
    FIELD("loads_by_cost", parse_bool, loads_by_cost),
    {"prefix_cache_seed", engine_cache_seed, 0},
    {"disk_cache", engine_disk_cache, 0},
    {"kv_connector", engine_connector, 0},
    {"eos_token_ids", engine_eos, 0},
    {"token_bytes", engine_token_bytes, 0},
    {"special_token_ids", engine_special, 0},
    FIELD("vocab_limit", parse_count, vocab_limit),
    {"banned_token_ids", engine_banned, 0},
};
#undef FIELD

int py_parse_engine(PyObject *options, const struct model_parts *parts, struct engine_config *config,
                    struct py_scratch *scratch)
{
    *config = (struct engine_config){
        .layout = parts->layout,
        .snapshot_tokens = SNAPSHOT_TOKENS,
        .n_pages = parts->n_pages,
        .max_num_seqs = parts->max_num_seqs,
        .max_num_batched_tokens = parts->max_num_batched_tokens,
        .max_model_len = parts->max_model_len,
        .max_logprobs = 20,
        .vocab_size = parts->vocab_size,
        .vocab_limit = parts->vocab_size,
        .prefix_caching = true,
        .runner = parts->runner,
    };
    return parse_fields(options, OPTIONS, sizeof OPTIONS / sizeof *OPTIONS, config, scratch,
                      "Engine() got an unexpected option");
}
