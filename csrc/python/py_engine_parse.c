/* py_engine_parse.c: parses the dictionaries of requests and engine options into C structs. */
#define PY_SSIZE_T_CLEAN
#include "py_connector.h"
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

/* The functions below store a value at `place`, whose type their name says. */
static int parse_count(const struct item *item, void *place)
{
    uint32_t *target = place;
    long long number;
    if (parse_integer(item, &number) < 0)
        return -1;
    if (number < 0 || number > UINT32_MAX)
        return refuse(item, "in [0, 2**32)");
    *target = (uint32_t)number;
    return 0;
}

static int parse_float(const struct item *item, void *place)
{
    float *target = place;
    double number = PyFloat_AsDouble(item->value);
    if (number == -1 && PyErr_Occurred())
        return -1;
    *target = (float)number;
    return 0;
}

static int parse_bool(const struct item *item, void *place)
{
    bool *target = place;
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

static int parse_int32_bytes(const struct item *item, void *place)
{
    struct id_list *list = place;
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

static int parse_id(const struct item *item, void *place)
{
    int32_t *id = place;
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

static int parse_ids(const struct item *item, void *place)
{
    struct id_list *list = place;
    void *ids = NULL;
    if (parse_sequence(item, sizeof(int32_t), parse_id, &ids, &list->n) < 0)
        return -1;
    list->ids = ids;
    return 0;
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

/* The place of a name among n names; n: it is none of them. */
static uint32_t name_index(PyObject *name, const char *const *names, uint32_t n)
{
    uint32_t i = 0;
    while (i < n && !(PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, names[i]) == 0))
        i++;
    return i;
}

/* A row of a table of parameters. parse gets a pointer to the field, or to the whole struct (offset 0). */
struct row {
    const char *name;
    int (*parse)(const struct item *item, void *place);
    size_t offset;
};

static int parse_row(const struct item *item, const struct row *rows, size_t n, void *target, const char *unknown)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(item->name, rows[i].name) == 0)
            return item->value == Py_None ? 0 : rows[i].parse(item, (char *)target + rows[i].offset);
    PyErr_Format(PyExc_TypeError, "%s '%s'", unknown, item->name);
    return -1;
}

/* Parses the items of a dictionary, each as its row says; None leaves the target's default. unknown: error for other names. */
static int parse_rows(PyObject *dictionary, const struct row *rows, size_t n, void *target, struct py_scratch *scratch,
                      const char *unknown)
{
    PyObject *key, *value;
    Py_ssize_t at = 0;
    while (PyDict_Next(dictionary, &at, &key, &value)) {
        PyObject *name = PyUnicode_AsUTF8String(key);
        int bad = !name || parse_row(&(struct item){PyBytes_AsString(name), value, scratch}, rows, n, target, unknown) < 0;
        Py_XDECREF(name);
        if (bad)
            return -1;
    }
    return 0;
}

/* ---- requests ---- */

static int request_bias(const struct item *item, void *place)
{
    struct request_spec *spec = place;
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

static int request_mode(const struct item *item, void *place)
{
    static const char *const NAMES[] = {[LOGPROB_RAW] = "raw_logprobs", [LOGPROB_FULL] = "full_logprobs",
                                        [LOGPROB_PROCESSED] = "processed_logprobs"};
    uint32_t *mode = place;
    *mode = name_index(item->value, NAMES, 3);
    return *mode < 3 ? 0 : refuse(item, "one of 'raw_logprobs', 'full_logprobs', 'processed_logprobs'");
}

static int request_logprobs(const struct item *item, void *place)
{
    struct request_spec *spec = place;
    spec->wants_logprobs = true;
    return parse_count(item, &spec->n_logprobs);
}

static int request_prompt_logprobs(const struct item *item, void *place)
{
    struct request_spec *spec = place;
    spec->wants_prompt_logprobs = true;
    return parse_count(item, &spec->n_prompt_logprobs);
}

static int request_score_start(const struct item *item, void *place)
{
    struct request_spec *spec = place;
    spec->is_score = true;
    return parse_count(item, &spec->score_start);
}

static int request_pooling(const struct item *item, void *place)
{
    static const char *const NAMES[] = {"last", "cls", "mean", "all"}; /* POOLING_LAST and on */
    uint32_t *pooling = place, number = name_index(item->value, NAMES, 4);
    *pooling = POOLING_LAST + number;
    return number < 4 ? 0 : refuse(item, "one of 'last', 'cls', 'mean', 'all'");
}

static int request_max_tokens(const struct item *item, void *place)
{
    struct request_spec *spec = place;
    long long number;
    if (parse_integer(item, &number) < 0)
        return -1;
    if (number < 1)
        return refuse(item, "at least 1");
    spec->max_tokens = number < UINT32_MAX ? (uint32_t)number : UINT32_MAX;
    return 0;
}

static int request_top_k(const struct item *item, void *place)
{
    struct request_spec *spec = place;
    long long number;
    if (parse_integer(item, &number) < 0)
        return -1;
    if (number < -1)
        return refuse(item, "0 (disable), or at least 1");
    spec->top_k = number < 0 || number > UINT32_MAX ? 0 : (uint32_t)number;
    return 0;
}

static int request_seed(const struct item *item, void *place)
{
    struct request_spec *spec = place;
    spec->seed = PyLong_AsUnsignedLongLong(item->value);
    return spec->seed == UINT64_MAX && PyErr_Occurred() ? -1 : 0;
}

static int request_priority(const struct item *item, void *place)
{
    struct request_spec *spec = place;
    long long number;
    int bad = parse_integer(item, &number);
    spec->priority = number;
    return bad;
}

static int request_stop(const struct item *item, void *place)
{
    struct request_spec *spec = place;
    void *strings = NULL;
    int bad = parse_sequence(item, sizeof(struct byte_string), element_bytes, &strings, &spec->n_stop_strings);
    spec->stop_strings = strings;
    return bad;
}

static int request_bad_words(const struct item *item, void *place)
{
    struct request_spec *spec = place;
    void *words = NULL;
    int bad = parse_sequence(item, sizeof(struct id_list), parse_ids, &words, &spec->n_bad_words);
    spec->bad_words = words;
    return bad;
}

static int request_allowed(const struct item *item, void *place)
{
    struct request_spec *spec = place;
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

static int request_speculative(const struct item *item, void *place)
{
    struct request_spec *spec = place;
    bool speculates = true;
    int bad = parse_bool(item, &speculates);
    spec->no_drafts = !speculates;
    return bad;
}

static int request_beam_width(const struct item *item, void *place)
{
    struct request_spec *spec = place;
    spec->is_beam_search = true;
    return parse_count(item, &spec->n);
}

static int request_early_stopping(const struct item *item, void *place)
{
    static const char *const NAMES[] = {
        [EARLY_NEVER] = "never", [EARLY_CANNOT_WIN] = "cannot_win", [EARLY_FOUND] = "found"};
    uint32_t *early_stopping = place;
    *early_stopping = name_index(item->value, NAMES, 3);
    return *early_stopping < 3 ? 0 : refuse(item, "one of 'never', 'cannot_win', 'found'");
}

static int request_salt(const struct item *item, void *place)
{
    struct request_spec *spec = place;
    return parse_bytes(item, &spec->salt.bytes, &spec->salt.n);
}

static int request_adapter(const struct item *item, void *place)
{
    struct request_spec *spec = place;
    spec->adapter = PyLong_AsUnsignedLongLong(item->value);
    return PyErr_Occurred() ? -1 : 0;
}

/* (kind, text, library), all bytes. */
static int request_grammar(const struct item *item, void *place)
{
    struct request_spec *spec = place;
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

/* One piece of an image: (rows, features, bytes, tables), its tables in the order of enum piece_table. The submitted objects
 * keep the bytes alive. */
static int parse_piece(const struct item *item, void *place)
{
    struct item_piece *piece = place;
    PyObject *bytes, *tables;
    *piece = (struct item_piece){0};
    if (!PyArg_ParseTuple(item->value, "IIO!O!", &piece->n_rows, &piece->n_features, &PyBytes_Type, &bytes, &PyTuple_Type,
                          &tables))
        return -1;
    piece->bytes = (const uint8_t *)PyBytes_AsString(bytes);
    piece->n_bytes = (size_t)PyBytes_Size(bytes);
    if (PyTuple_Size(tables) != PIECE_TABLES)
        return refuse(item, "pieces of images");
    for (Py_ssize_t i = 0; i < PIECE_TABLES; i++) {
        struct item table = {item->name, PyTuple_GetItem(tables, i), item->scratch};
        struct id_list list = {0};
        if (parse_int32_bytes(&table, &list) < 0)
            return -1;
        piece->tables[i].values = list.ids;
        piece->tables[i].n = list.n;
    }
    return 0;
}

/* One image: (first token, tokens, features, content, pieces). */
static int parse_item(const struct item *item, void *place)
{
    struct prompt_item *image = place;
    const char *content;
    Py_ssize_t n_content;
    PyObject *pieces;
    void *parsed = NULL;
    *image = (struct prompt_item){0};
    if (!PyArg_ParseTuple(item->value, "IIIy#O", &image->first, &image->n_tokens, &image->n_features, &content, &n_content,
                          &pieces))
        return -1;
    if (n_content != sizeof image->content)
        return refuse(item, "images with a content of 16 bytes");
    memcpy(&image->content, content, sizeof image->content);
    struct item list = {item->name, pieces, item->scratch};
    int bad = parse_sequence(&list, sizeof(struct item_piece), parse_piece, &parsed, &image->n_pieces);
    image->pieces = parsed;
    return bad;
}

static int request_items(const struct item *item, void *place)
{
    struct request_spec *spec = place;
    void *items = NULL;
    int bad = parse_sequence(item, sizeof(struct prompt_item), parse_item, &items, &spec->n_items);
    spec->items = items;
    return bad;
}

static int request_rope_delta(const struct item *item, void *place)
{
    struct request_spec *spec = place;
    long long number;
    int bad = parse_integer(item, &number);
    spec->rope_delta = (int32_t)number;
    return bad;
}

#define FIELD(name, parse, field) {name, parse, offsetof(struct request_spec, field)}
static const struct row PARAMETERS[] = {
    FIELD("n", parse_count, n),
    FIELD("temperature", parse_float, temperature),
    FIELD("top_p", parse_float, top_p),
    {"top_k", request_top_k, 0},
    FIELD("min_p", parse_float, min_p),
    FIELD("presence_penalty", parse_float, presence_penalty),
    FIELD("frequency_penalty", parse_float, frequency_penalty),
    FIELD("repetition_penalty", parse_float, repetition_penalty),
    {"max_tokens", request_max_tokens, 0},
    FIELD("min_tokens", parse_count, min_tokens),
    FIELD("stop_token_ids", parse_ids, stop_ids),
    FIELD("ignore_eos", parse_bool, ignore_eos),
    {"seed", request_seed, 0},
    FIELD("sample_index", parse_count, sample_index),
    {"logprobs", request_logprobs, 0},
    {"prompt_logprobs", request_prompt_logprobs, 0},
    FIELD("logprobs_mode", request_mode, mode),
    {"logit_bias", request_bias, 0},
    {"allowed_token_ids", request_allowed, 0},
    {"bad_words", request_bad_words, 0},
    {"stop", request_stop, 0},
    {"grammar", request_grammar, 0},
    FIELD("hide_special", parse_bool, hide_special),
    {"speculative", request_speculative, 0},
    {"beam_width", request_beam_width, 0},
    FIELD("length_penalty", parse_float, length_penalty),
    FIELD("early_stopping", request_early_stopping, early_stopping),
    FIELD("prior", parse_int32_bytes, prior),
    FIELD("token_type_ids", parse_int32_bytes, types),
    {"salt", request_salt, 0},
    {"adapter", request_adapter, 0},
    {"priority", request_priority, 0},
    {"score_start", request_score_start, 0},
    FIELD("pooling", request_pooling, pooling),
    {"items", request_items, 0},
    FIELD("rope_positions", parse_int32_bytes, rope_positions),
    {"rope_delta", request_rope_delta, 0},
};
#undef FIELD

int py_parse_request(PyObject *prompt, PyObject *params, struct request_spec *spec, struct py_scratch *scratch)
{
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
    return parse_rows(params, PARAMETERS, sizeof PARAMETERS / sizeof *PARAMETERS, spec, scratch,
                      "submit() got an unexpected parameter");
}

/* ---- engine options ---- */

static int engine_policy(const struct item *item, void *place)
{
    static const char *const NAMES[] = {[POLICY_FCFS] = "fcfs", [POLICY_PRIORITY] = "priority"};
    struct engine_config *config = place;
    uint32_t number = name_index(item->value, NAMES, 2);
    struct err err;
    config->policy = (enum engine_policy)number;
    if (number < 2)
        return 0;
    err_set(&err, RC_CONFIG, "scheduling_policy must be 'fcfs' or 'priority'.");
    err_name(&err, "scheduling_policy", NULL);
    py_raise(&err);
    return -1;
}

static int engine_preemption(const struct item *item, void *place)
{
    static const char *const NAMES[] = {[PREEMPTION_AUTO] = "auto", [PREEMPTION_RECOMPUTE] = "recompute",
                                        [PREEMPTION_SWAP] = "swap"};
    struct engine_config *config = place;
    uint32_t number = name_index(item->value, NAMES, 3);
    config->preemption = (enum preemption)number;
    return number < 3 ? 0 : refuse(item, "'auto', 'recompute' or 'swap'");
}

static int engine_cache_seed(const struct item *item, void *place)
{
    struct engine_config *config = place;
    config->has_cache_seed = item->value != Py_None;
    config->cache_seed = config->has_cache_seed ? PyLong_AsUnsignedLongLong(item->value) : 0;
    return config->cache_seed == UINT64_MAX && PyErr_Occurred() ? -1 : 0;
}

/* (path, bytes, fingerprint, whether the folder is shared) */
static int engine_disk_cache(const struct item *item, void *place)
{
    struct engine_config *config = place;
    struct disk_options *disk = scratch_alloc(item->scratch, 1, sizeof *disk);
    const char *path, *fingerprint;
    unsigned long long bytes;
    Py_ssize_t n_path, n_fingerprint;
    int is_shared;
    if (!disk)
        return -1;
    if (!PyTuple_Check(item->value) ||
        !PyArg_ParseTuple(item->value, "y#Ky#p", &path, &n_path, &bytes, &fingerprint, &n_fingerprint,
                          &is_shared))
        return PyErr_Occurred() ? -1 : refuse(item, "a tuple");
    if (n_fingerprint != DISK_FINGERPRINT || memchr(path, 0, (size_t)n_path))
        return refuse(item, "a path, bytes and a fingerprint of 16 bytes");
    *disk = (struct disk_options){.path = path, .bytes = bytes, .is_shared = is_shared}; /* the tuple outlives engine_create */
    memcpy(disk->fingerprint, fingerprint, DISK_FINGERPRINT);
    config->disk = disk;
    return 0;
}

/* ("peer" or a path, fingerprint, whether other engines know the keys, deadline, (name, value, ..)), text as bytes */
static int engine_library(const struct item *item, struct engine_config *config)
{
    struct library_options *library = scratch_alloc(item->scratch, 1, sizeof *library);
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
        return refuse(item, "a path, a fingerprint of 16 bytes, and pairs");
    memcpy(library->fingerprint, fingerprint, LIBRARY_FINGERPRINT);
    library->is_shared = is_shared;
    library->n_pairs = (uint32_t)PyTuple_Size(words) / 2;
    struct connector_pair *pairs = scratch_alloc(item->scratch, library->n_pairs + 1, sizeof *pairs);
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
static int engine_connector(const struct item *item, void *place)
{
    struct engine_config *config = place;
    if (PyTuple_Check(item->value) && PyTuple_Size(item->value) && PyBytes_Check(PyTuple_GetItem(item->value, 0)))
        return engine_library(item, config);
    struct connector *connector = scratch_alloc(item->scratch, 1, sizeof *connector);
    if (!connector || py_connector_make(item->value, config->runner.host_slot_bytes, connector) < 0)
        return -1;
    config->connector = connector;
    return 0;
}

static int engine_draft_method(const struct item *item, void *place)
{
    static const char *const NAMES[] = {[DRAFT_NONE] = "", [DRAFT_NGRAM] = "ngram", [DRAFT_SUFFIX] = "suffix",
                                        [DRAFT_MODEL] = "draft", [DRAFT_HEAD] = "head", [DRAFT_HEADS] = "heads"};
    struct engine_config *config = place;
    uint32_t number = name_index(item->value, NAMES, 6);
    config->drafts.method = (enum draft_method)number;
    return number < 6 ? 0 : refuse(item, "'', 'ngram', 'suffix', 'draft', 'head' or 'heads'");
}

/* A tuple of _core.Models; the engine object keeps them alive. */
static int engine_drafter(const struct item *item, void *place)
{
    struct engine_config *config = place;
    struct drafter_model *drafter = &config->drafter;
    if (!PyTuple_Check(item->value) || PyTuple_Size(item->value) < 1 || PyTuple_Size(item->value) > (Py_ssize_t)MAX_DRAFTS)
        return refuse(item, "a tuple of 1 to 16 models");
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

static int engine_draft_shared(const struct item *item, void *place)
{
    struct engine_config *config = place;
    long long number;
    int bad = parse_integer(item, &number);
    config->drafts.shared_bytes = (uint64_t)number;
    return bad;
}

static int engine_token_bytes(const struct item *item, void *place)
{
    struct engine_config *config = place;
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

#define LIST(list)                                                       \
    static int engine_##list(const struct item *item, void *place)       \
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
static const struct row OPTIONS[] = {
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
    return parse_rows(options, OPTIONS, sizeof OPTIONS / sizeof *OPTIONS, config, scratch,
                      "Engine() got an unexpected option");
}
