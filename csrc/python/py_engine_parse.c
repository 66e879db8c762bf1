/* py_engine_parse.c: parses the dictionaries of requests and engine options into C structs. */
#include "py_engine.h"

#include "../base/mem.h"

#include <string.h>

struct py_block {
    struct py_block *next;
    max_align_t data[];
};

static void *scratch_alloc(struct py_scratch *scratch, size_t count, size_t size_bytes)
{
    struct py_block *block = mem_alloc(sizeof *block + count * size_bytes);
    if (!block) {
        PyErr_NoMemory();
        return NULL;
    }
    block->next = scratch->first;
    scratch->first = block;
    return block->data;
}

void py_scratch_free(struct py_scratch *scratch)
{
    while (scratch->first) {
        struct py_block *block = scratch->first;
        scratch->first = block->next;
        mem_free(block);
    }
}

/* ---- values ---- */

/* One value of a dictionary. name: the key, for error texts. scratch: owns what parsing allocates. */
struct item {
    const char *name;
    PyObject *value;
    struct py_scratch *scratch;
};

static int refuse(const struct item *item, const char *wanted)
{
    struct err err;
    PyObject *text = PyObject_Repr(item->value), *bytes = text ? PyUnicode_AsUTF8String(text) : NULL;
    if (bytes) {
        err_set(&err, RC_INVALID, "%s must be %s, got %s.", item->name, wanted, PyBytes_AsString(bytes));
        err_name(&err, item->name, NULL);
        py_raise(&err);
    }
    Py_XDECREF(bytes);
    Py_XDECREF(text);
    return -1;
}

static int parse_integer(const struct item *item, long long *number)
{
    int overflow;
    *number = PyLong_AsLongLongAndOverflow(item->value, &overflow);
    if (overflow)
        return refuse(item, "in [-2**63, 2**63)");
    return *number == -1 && PyErr_Occurred() ? -1 : 0;
}

static int parse_count(const struct item *item, uint32_t *target)
{
    long long number;
    if (parse_integer(item, &number) < 0)
        return -1;
    if (number < 0 || number > UINT32_MAX)
        return refuse(item, "in [0, 2**32)");
    *target = (uint32_t)number;
    return 0;
}

static int parse_float(const struct item *item, float *target)
{
    double number = PyFloat_AsDouble(item->value);
    if (number == -1 && PyErr_Occurred())
        return -1;
    *target = (float)number;
    return 0;
}

static int parse_bool(const struct item *item, bool *target)
{
    int truth = PyObject_IsTrue(item->value);
    *target = truth > 0;
    return truth < 0 ? -1 : 0;
}

static int parse_bytes(const struct item *item, const char **bytes, uint32_t *n_bytes)
{
    char *start;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(item->value, &start, &size) < 0)
        return -1;
    if ((size_t)size > UINT32_MAX)
        return refuse(item, "shorter than 2**32 bytes");
    *bytes = start;
    *n_bytes = (uint32_t)size;
    return 0;
}

static int parse_int32_bytes(const struct item *item, struct id_list *list)
{
    const char *bytes = NULL;
    if (parse_bytes(item, &bytes, &list->n) < 0)
        return -1;
    if (list->n % sizeof(int32_t))
        return refuse(item, "int32 values");
    list->n /= sizeof(int32_t);
    int32_t *ids = scratch_alloc(item->scratch, list->n, sizeof *ids);
    if (!ids)
        return -1;
    memcpy(ids, bytes, list->n * sizeof *ids); /* the bytes object need not be aligned */
    list->ids = ids;
    return 0;
}

static int parse_id(const struct item *item, int32_t *id)
{
    long long number;
    if (parse_integer(item, &number) < 0)
        return -1;
    *id = number >= INT32_MIN && number <= INT32_MAX ? (int32_t)number : -1; /* -1 is outside every vocabulary */
    return 0;
}

/* Calls parse_element for each element of a sequence, with a pointer to element i of *array. */
static int parse_sequence(const struct item *item, size_t size_bytes, int (*parse_element)(const struct item *, void *),
                          void **array, uint32_t *n)
{
    Py_ssize_t size = PySequence_Size(item->value);
    char *places = size < 0 ? NULL : scratch_alloc(item->scratch, (size_t)size, size_bytes);
    if (!places)
        return -1;
    for (Py_ssize_t i = 0; i < size; i++) {
        struct item element = {item->name, PySequence_GetItem(item->value, i), item->scratch};
        int bad = !element.value || parse_element(&element, places + (size_t)i * size_bytes) < 0;
        Py_XDECREF(element.value);
        if (bad)
            return -1;
    }
    *array = places;
    *n = (uint32_t)size;
    return 0;
}

static int element_id(const struct item *item, void *place)
{
    return parse_id(item, place);
}

static int parse_ids(const struct item *item, struct id_list *list)
{
    void *ids = NULL;
    if (parse_sequence(item, sizeof(int32_t), element_id, &ids, &list->n) < 0)
        return -1;
    list->ids = ids;
    return 0;
}

static int element_ids(const struct item *item, void *place)
{
    return parse_ids(item, place);
}

static int element_bytes(const struct item *item, void *place)
{
    struct byte_string *string = place;
    const char *bytes = NULL;
    if (parse_bytes(item, &bytes, &string->n) < 0)
        return -1;
    char *copy = scratch_alloc(item->scratch, string->n, 1); /* an element that the sequence computes dies with its reference */
    string->bytes = copy;
    return copy ? (memcpy(copy, bytes, string->n), 0) : -1;
}

static int parse_bias(const struct item *item, struct request_spec *spec)
{
    PyObject *key, *value;
    Py_ssize_t at = 0, size = PyDict_Size(item->value);
    struct token_bias *bias = size < 0 ? NULL : scratch_alloc(item->scratch, (size_t)size, sizeof *bias);
    if (!bias)
        return -1;
    spec->bias = bias;
    for (; PyDict_Next(item->value, &at, &key, &value); spec->n_bias++, bias++) {
        struct item id = {item->name, key, item->scratch}, number = {item->name, value, item->scratch};
        if (parse_id(&id, &bias->id) < 0 || parse_float(&number, &bias->value) < 0)
            return -1;
    }
    return 0;
}

static int parse_mode(const struct item *item, uint32_t *mode)
{
    static const char *const NAMES[] = {[LOGPROB_RAW] = "raw_logprobs", [LOGPROB_FULL] = "full_logprobs",
                                        [LOGPROB_PROCESSED] = "processed_logprobs"};
    for (uint32_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++)
        if (PyUnicode_Check(item->value) && PyUnicode_CompareWithASCIIString(item->value, NAMES[i]) == 0) {
            *mode = i;
            return 0;
        }
    return refuse(item, "one of 'raw_logprobs', 'full_logprobs', 'processed_logprobs'");
}

/* ---- requests ---- */

static int request_logprobs(const struct item *item, struct request_spec *spec)
{
    spec->wants_logprobs = true;
    return parse_count(item, &spec->n_logprobs);
}

static int request_prompt_logprobs(const struct item *item, struct request_spec *spec)
{
    spec->wants_prompt_logprobs = true;
    return parse_count(item, &spec->n_prompt_logprobs);
}

static int request_score_start(const struct item *item, struct request_spec *spec)
{
    spec->is_score = true;
    return parse_count(item, &spec->score_start);
}

static int request_pooling(const struct item *item, struct request_spec *spec)
{
    static const char *const NAMES[] = {"last", "cls", "mean", "all"}; /* POOLING_LAST and on */
    for (uint32_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++)
        if (PyUnicode_Check(item->value) && PyUnicode_CompareWithASCIIString(item->value, NAMES[i]) == 0) {
            spec->pooling = POOLING_LAST + i;
            return 0;
        }
    return refuse(item, "one of 'last', 'cls', 'mean', 'all'");
}

static int request_max_tokens(const struct item *item, struct request_spec *spec)
{
    long long number;
    if (parse_integer(item, &number) < 0)
        return -1;
    if (number < 1)
        return refuse(item, "at least 1");
    spec->max_tokens = number < UINT32_MAX ? (uint32_t)number : UINT32_MAX;
    return 0;
}

static int request_top_k(const struct item *item, struct request_spec *spec)
{
    long long number;
    if (parse_integer(item, &number) < 0)
        return -1;
    if (number < -1)
        return refuse(item, "0 (disable), or at least 1");
    spec->top_k = number < 0 || number > UINT32_MAX ? 0 : (uint32_t)number;
    return 0;
}

static int request_seed(const struct item *item, struct request_spec *spec)
{
    spec->seed = PyLong_AsUnsignedLongLong(item->value);
    return spec->seed == UINT64_MAX && PyErr_Occurred() ? -1 : 0;
}

static int request_priority(const struct item *item, struct request_spec *spec)
{
    long long number;
    int bad = parse_integer(item, &number);
    spec->priority = number;
    return bad;
}

static int request_stop(const struct item *item, struct request_spec *spec)
{
    void *strings = NULL;
    int bad = parse_sequence(item, sizeof(struct byte_string), element_bytes, &strings, &spec->n_stop_strings);
    spec->stop_strings = strings;
    return bad;
}

static int request_bad_words(const struct item *item, struct request_spec *spec)
{
    void *words = NULL;
    int bad = parse_sequence(item, sizeof(struct id_list), element_ids, &words, &spec->n_bad_words);
    spec->bad_words = words;
    return bad;
}

static int request_allowed(const struct item *item, struct request_spec *spec)
{
    struct err err;
    if (parse_ids(item, &spec->allowed) < 0)
        return -1;
    if (spec->allowed.n)
        return 0;
    err_set(&err, RC_INVALID, "allowed_token_ids is not None and empty!");
    err_name(&err, item->name, NULL);
    py_raise(&err);
    return -1;
}

static int request_salt(const struct item *item, struct request_spec *spec)
{
    return parse_bytes(item, &spec->salt.bytes, &spec->salt.n);
}

/* (kind, text, library), all bytes. */
static int request_grammar(const struct item *item, struct request_spec *spec)
{
    PyObject *parts = item->value;
    struct grammar_spec *grammar = &spec->grammar;
    const char **places[] = {&grammar->kind, &grammar->text, &grammar->library};
    if (!PyTuple_Check(parts) || PyTuple_Size(parts) != 3)
        return refuse(item, "a tuple of kind, text and library");
    for (Py_ssize_t i = 0; i < 3; i++)
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(parts, i), (char **)places[i], NULL) < 0) /* refuses a NUL within */
            return -1;
    return 0;
}

#define FIELD(function, parse, field)                                                 \
    static int function(const struct item *item, struct request_spec *spec)           \
    {                                                                                 \
        return parse(item, &spec->field);                                             \
    }
FIELD(request_n, parse_count, n)
FIELD(request_temperature, parse_float, temperature)
FIELD(request_top_p, parse_float, top_p)
FIELD(request_min_p, parse_float, min_p)
FIELD(request_presence, parse_float, presence_penalty)
FIELD(request_frequency, parse_float, frequency_penalty)
FIELD(request_repetition, parse_float, repetition_penalty)
FIELD(request_min_tokens, parse_count, min_tokens)
FIELD(request_stop_ids, parse_ids, stop_ids)
FIELD(request_ignore_eos, parse_bool, ignore_eos)
FIELD(request_sample_index, parse_count, sample_index)
FIELD(request_mode, parse_mode, mode)
FIELD(request_hide_special, parse_bool, hide_special)
FIELD(request_prior, parse_int32_bytes, prior)
FIELD(request_types, parse_int32_bytes, types)

static const struct {
    const char *name;
    int (*parse)(const struct item *item, struct request_spec *spec);
} PARAMS[] = {
    {"n", request_n},
    {"temperature", request_temperature},
    {"top_p", request_top_p},
    {"top_k", request_top_k},
    {"min_p", request_min_p},
    {"presence_penalty", request_presence},
    {"frequency_penalty", request_frequency},
    {"repetition_penalty", request_repetition},
    {"max_tokens", request_max_tokens},
    {"min_tokens", request_min_tokens},
    {"stop_token_ids", request_stop_ids},
    {"ignore_eos", request_ignore_eos},
    {"seed", request_seed},
    {"sample_index", request_sample_index},
    {"logprobs", request_logprobs},
    {"prompt_logprobs", request_prompt_logprobs},
    {"logprobs_mode", request_mode},
    {"logit_bias", parse_bias},
    {"allowed_token_ids", request_allowed},
    {"bad_words", request_bad_words},
    {"stop", request_stop},
    {"grammar", request_grammar},
    {"hide_special", request_hide_special},
    {"prior", request_prior},
    {"token_type_ids", request_types},
    {"salt", request_salt},
    {"priority", request_priority},
    {"score_start", request_score_start},
    {"pooling", request_pooling},
};

static int parse_param(PyObject *key, PyObject *value, struct request_spec *spec, struct py_scratch *scratch)
{
    for (size_t i = 0; PyUnicode_Check(key) && i < sizeof PARAMS / sizeof *PARAMS; i++)
        if (PyUnicode_CompareWithASCIIString(key, PARAMS[i].name) == 0)
            return value == Py_None ? 0 : PARAMS[i].parse(&(struct item){PARAMS[i].name, value, scratch}, spec);
    PyErr_Format(PyExc_TypeError, "submit() got an unexpected parameter %R", key);
    return -1;
}

int py_parse_request(PyObject *prompt, PyObject *params, struct request_spec *spec, struct py_scratch *scratch)
{
    PyObject *key, *value;
    Py_ssize_t at = 0;
    *spec = (struct request_spec){
        .n = 1, .temperature = 1, .top_p = 1, .repetition_penalty = 1, .max_tokens = UINT32_MAX, .hide_special = true,
    };
    if (parse_int32_bytes(&(struct item){"prompt", prompt, scratch}, &spec->prompt) < 0)
        return -1;
    PyObject *seed = PyDict_GetItemString(params, "seed");
    if (!seed || seed == Py_None) {
        PyErr_SetString(PyExc_TypeError, "submit() misses the parameter 'seed'");
        return -1;
    }
    while (PyDict_Next(params, &at, &key, &value))
        if (parse_param(key, value, spec, scratch) < 0)
            return -1;
    return 0;
}

/* ---- engine options ---- */

struct engine_target {
    struct engine_config *config;
    struct id_list eos, special, banned;
};

static int engine_policy(const struct item *item, struct engine_config *config)
{
    static const char *const NAMES[] = {[POLICY_FCFS] = "fcfs", [POLICY_PRIORITY] = "priority"};
    for (int i = 0; i < 2; i++)
        if (PyUnicode_Check(item->value) && PyUnicode_CompareWithASCIIString(item->value, NAMES[i]) == 0) {
            config->policy = (enum engine_policy)i;
            return 0;
        }
    struct err err;
    err_set(&err, RC_CONFIG, "scheduling_policy must be 'fcfs' or 'priority'.");
    err_name(&err, "scheduling_policy", NULL);
    py_raise(&err);
    return -1;
}

static int engine_token_bytes(const struct item *item, struct engine_config *config)
{
    Py_ssize_t n = PySequence_Size(item->value);
    uint64_t *offsets = n < 0 ? NULL : scratch_alloc(item->scratch, (size_t)n + 1, sizeof *offsets);
    if (!offsets)
        return -1;
    void *strings = NULL;
    uint32_t n_strings;
    if (parse_sequence(item, sizeof(struct byte_string), element_bytes, &strings, &n_strings) < 0)
        return -1;
    const struct byte_string *tokens = strings;
    offsets[0] = 0;
    for (uint32_t i = 0; i < n_strings; i++)
        offsets[i + 1] = offsets[i] + tokens[i].n;
    char *bytes = scratch_alloc(item->scratch, offsets[n_strings], 1);
    if (!bytes)
        return -1;
    for (uint32_t i = 0; i < n_strings; i++)
        memcpy(bytes + offsets[i], tokens[i].bytes, tokens[i].n);
    config->token_bytes = bytes;
    config->token_offsets = offsets;
    config->n_tokens = n_strings;
    return 0;
}

static int parse_option(const struct item *item, struct engine_target *target)
{
    struct engine_config *config = target->config;
    if (strcmp(item->name, "max_logprobs") == 0)
        return parse_count(item, &config->max_logprobs);
    if (strcmp(item->name, "kv_event_capacity") == 0)
        return parse_count(item, &config->n_kv_events);
    if (strcmp(item->name, "enable_prefix_caching") == 0)
        return parse_bool(item, &config->prefix_caching);
    if (strcmp(item->name, "is_serial") == 0)
        return parse_bool(item, &config->is_serial);
    if (strcmp(item->name, "policy") == 0)
        return engine_policy(item, config);
    if (strcmp(item->name, "eos_token_ids") == 0)
        return parse_ids(item, &target->eos);
    if (strcmp(item->name, "token_bytes") == 0)
        return engine_token_bytes(item, config);
    if (strcmp(item->name, "special_token_ids") == 0)
        return parse_ids(item, &target->special);
    if (strcmp(item->name, "vocab_limit") == 0)
        return parse_count(item, &config->vocab_limit);
    if (strcmp(item->name, "banned_token_ids") == 0)
        return parse_ids(item, &target->banned);
    PyErr_Format(PyExc_TypeError, "Engine() got an unexpected option '%s'", item->name);
    return -1;
}

int py_parse_engine(PyObject *options, const struct model_parts *parts, struct engine_config *config,
                    struct py_scratch *scratch)
{
    PyObject *key, *value;
    Py_ssize_t at = 0;
    struct engine_target target = {.config = config};
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
    while (PyDict_Next(options, &at, &key, &value)) {
        PyObject *name = PyUnicode_AsUTF8String(key);
        int bad =
            !name || (value != Py_None && parse_option(&(struct item){PyBytes_AsString(name), value, scratch}, &target) < 0);
        Py_XDECREF(name);
        if (bad)
            return -1;
    }
    config->eos_ids = target.eos.ids;
    config->n_eos = target.eos.n;
    config->special_ids = target.special.ids;
    config->n_special = target.special.n;
    config->banned_ids = target.banned.ids;
    config->n_banned = target.banned.n;
    return 0;
}
