/* py_request_parse.c: parses the parameters of a request into a struct request_spec. */
#define PY_SSIZE_T_CLEAN
#include "py_engine.h"
#include "py_values.h"

#include <string.h>

static int request_bias(const struct py_item *item, void *place)
{
    struct request_spec *spec = place;
    PyObject *key, *value;
    Py_ssize_t at = 0, size = PyDict_Size(item->value);
    struct token_bias *bias = size < 0 ? NULL : py_scratch_alloc(item->scratch, (size_t)size, sizeof *bias);
    if (!bias)
        return -1;
    spec->bias = bias;
    for (; PyDict_Next(item->value, &at, &key, &value); spec->n_bias++, bias++) {
        struct py_item id = {item->name, key, item->scratch}, number = {item->name, value, item->scratch};
        if (parse_id(&id, &bias->id) < 0 || parse_float(&number, &bias->value) < 0)
            return -1;
    }
    return 0;
}

static int request_mode(const struct py_item *item, void *place)
{
    static const char *const NAMES[] = {[LOGPROB_RAW] = "raw_logprobs", [LOGPROB_FULL] = "full_logprobs",
                                        [LOGPROB_PROCESSED] = "processed_logprobs"};
    uint32_t *mode = place;
    *mode = parse_name(item->value, NAMES, 3);
    return *mode < 3 ? 0 : parse_refuse(item, "one of 'raw_logprobs', 'full_logprobs', 'processed_logprobs'");
}

static int request_logprobs(const struct py_item *item, void *place)
{
    struct request_spec *spec = place;
    spec->wants_logprobs = true;
    return parse_count(item, &spec->n_logprobs);
}

static int request_prompt_logprobs(const struct py_item *item, void *place)
{
    struct request_spec *spec = place;
    spec->wants_prompt_logprobs = true;
    return parse_count(item, &spec->n_prompt_logprobs);
}

static int request_score_start(const struct py_item *item, void *place)
{
    struct request_spec *spec = place;
    spec->is_score = true;
    return parse_count(item, &spec->score_start);
}

static int request_pooling(const struct py_item *item, void *place)
{
    static const char *const NAMES[] = {"last", "cls", "mean", "all"}; /* POOLING_LAST and on */
    uint32_t *pooling = place, number = parse_name(item->value, NAMES, 4);
    *pooling = POOLING_LAST + number;
    return number < 4 ? 0 : parse_refuse(item, "one of 'last', 'cls', 'mean', 'all'");
}

static int request_max_tokens(const struct py_item *item, void *place)
{
    struct request_spec *spec = place;
    long long number;
    if (parse_integer(item, &number) < 0)
        return -1;
    if (number < 1)
        return parse_refuse(item, "at least 1");
    spec->max_tokens = number < UINT32_MAX ? (uint32_t)number : UINT32_MAX;
    return 0;
}

static int request_top_k(const struct py_item *item, void *place)
{
    struct request_spec *spec = place;
    long long number;
    if (parse_integer(item, &number) < 0)
        return -1;
    if (number < -1)
        return parse_refuse(item, "0 (disable), or at least 1");
    spec->top_k = number < 0 || number > UINT32_MAX ? 0 : (uint32_t)number;
    return 0;
}

static int request_seed(const struct py_item *item, void *place)
{
    struct request_spec *spec = place;
    spec->seed = PyLong_AsUnsignedLongLong(item->value);
    return spec->seed == UINT64_MAX && PyErr_Occurred() ? -1 : 0;
}

static int request_priority(const struct py_item *item, void *place)
{
    struct request_spec *spec = place;
    long long number;
    int bad = parse_integer(item, &number);
    spec->priority = number;
    return bad;
}

static int request_stop(const struct py_item *item, void *place)
{
    struct request_spec *spec = place;
    void *strings = NULL;
    int bad = parse_sequence(item, sizeof(struct byte_string), parse_byte_string, &strings, &spec->n_stop_strings);
    spec->stop_strings = strings;
    return bad;
}

static int request_bad_words(const struct py_item *item, void *place)
{
    struct request_spec *spec = place;
    void *words = NULL;
    int bad = parse_sequence(item, sizeof(struct id_list), parse_ids, &words, &spec->n_bad_words);
    spec->bad_words = words;
    return bad;
}

static int request_allowed(const struct py_item *item, void *place)
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

static int request_speculative(const struct py_item *item, void *place)
{
    struct request_spec *spec = place;
    bool speculates = true;
    int bad = parse_bool(item, &speculates);
    spec->no_drafts = !speculates;
    return bad;
}

static int request_beam_width(const struct py_item *item, void *place)
{
    struct request_spec *spec = place;
    spec->is_beam_search = true;
    return parse_count(item, &spec->n);
}

static int request_early_stopping(const struct py_item *item, void *place)
{
    static const char *const NAMES[] = {
        [EARLY_NEVER] = "never", [EARLY_CANNOT_WIN] = "cannot_win", [EARLY_FOUND] = "found"};
    uint32_t *early_stopping = place;
    *early_stopping = parse_name(item->value, NAMES, 3);
    return *early_stopping < 3 ? 0 : parse_refuse(item, "one of 'never', 'cannot_win', 'found'");
}

static int request_salt(const struct py_item *item, void *place)
{
    struct request_spec *spec = place;
    return parse_bytes(item, &spec->salt.bytes, &spec->salt.n);
}

static int request_adapter(const struct py_item *item, void *place)
{
    struct request_spec *spec = place;
    spec->adapter = PyLong_AsUnsignedLongLong(item->value);
    return PyErr_Occurred() ? -1 : 0;
}

/* (kind, text, library), all bytes. */
static int request_grammar(const struct py_item *item, void *place)
{
    struct request_spec *spec = place;
    PyObject *parts = item->value;
    struct grammar_spec *grammar = &spec->grammar;
    const char **places[] = {&grammar->kind, &grammar->text, &grammar->library};
    if (!PyTuple_Check(parts) || PyTuple_Size(parts) != 3)
        return parse_refuse(item, "a tuple of kind, text and library");
    for (Py_ssize_t i = 0; i < 3; i++)
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(parts, i), (char **)places[i], NULL) < 0) /* refuses a NUL within */
            return -1;
    return 0;
}

/* One piece of an image: (rows, features, bytes, tables), its tables in the order of enum piece_table. The submitted objects
 * keep the bytes alive. */
static int parse_piece(const struct py_item *item, void *place)
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
        return parse_refuse(item, "pieces of images");
    for (Py_ssize_t i = 0; i < PIECE_TABLES; i++) {
        struct py_item table = {item->name, PyTuple_GetItem(tables, i), item->scratch};
        struct id_list list = {0};
        if (parse_int32_bytes(&table, &list) < 0)
            return -1;
        piece->tables[i].values = list.ids;
        piece->tables[i].n = list.n;
    }
    return 0;
}

/* One image: (first token, tokens, features, content, pieces). */
static int parse_item(const struct py_item *item, void *place)
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
        return parse_refuse(item, "images with a content of 16 bytes");
    memcpy(&image->content, content, sizeof image->content);
    struct py_item list = {item->name, pieces, item->scratch};
    int bad = parse_sequence(&list, sizeof(struct item_piece), parse_piece, &parsed, &image->n_pieces);
    image->pieces = parsed;
    return bad;
}

static int request_items(const struct py_item *item, void *place)
{
    struct request_spec *spec = place;
    void *items = NULL;
    int bad = parse_sequence(item, sizeof(struct prompt_item), parse_item, &items, &spec->n_items);
    spec->items = items;
    return bad;
}

static int request_rope_delta(const struct py_item *item, void *place)
{
    struct request_spec *spec = place;
    long long number;
    int bad = parse_integer(item, &number);
    spec->rope_delta = (int32_t)number;
    return bad;
}

#define FIELD(name, parse, field) {name, parse, offsetof(struct request_spec, field)}
static const struct py_field PARAMETERS[] = {
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
    FIELD("saves_early", parse_bool, saves_early),
    FIELD("awaits_s", parse_float, awaits_s),
    {"adapter", request_adapter, 0},
    FIELD("text_key", parse_count, text_key),
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
    if (parse_int32_bytes(&(struct py_item){"prompt", prompt, scratch}, &spec->prompt) < 0)
        return -1;
    PyObject *seed = PyDict_GetItemString(params, "seed");
    if (!seed || seed == Py_None) {
        PyErr_SetString(PyExc_TypeError, "submit() misses the parameter 'seed'");
        return -1;
    }
    return parse_fields(params, PARAMETERS, sizeof PARAMETERS / sizeof *PARAMETERS, spec, scratch,
                      "submit() got an unexpected parameter");
}
