/* py_model.c: the type _core.Model. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include "py.h"

#include "../base/mem.h"
#include "../step/kv_layout.h"
#include "../program/follower.h"
#include "../program/layout.h"
#include "../program/lora.h"
#include "../program/team.h"
#include "py_engine.h"
#include "py_program.h"

#include <string.h>
#include <time.h>

typedef struct {
    PyObject_HEAD
    struct team *team;
    uint32_t max_num_seqs, max_num_batched_tokens;
    uint32_t n_borrowers; /* calls of other files that use the model without the GIL */
    PyObject *lent;       /* dict of py_model_keep; None -> list of those without a name; NULL: none yet */
} Model;

/* ---- options --------------------------------------------------------------------------------------------------------- */

static int get_number(PyObject *options, const char *key, uint64_t *out)
{
    PyObject *item = PyMapping_GetItemString(options, key);
    if (!item)
        return -1;
    *out = PyLong_AsUnsignedLongLong(item);
    Py_DECREF(item);
    return PyErr_Occurred() ? -1 : 0;
}

static int get_count(PyObject *options, const char *key, uint32_t *out)
{
    uint64_t number = 0;
    int bad = get_number(options, key, &number);
    *out = (uint32_t)number;
    return bad;
}

/* A text under a key, borrowed from the options. */
static const char *get_text(PyObject *options, const char *key)
{
    PyObject *item = PyMapping_GetItemString(options, key);
    const char *text = item ? PyUnicode_AsUTF8AndSize(item, NULL) : NULL;
    Py_XDECREF(item);
    return text;
}

static int get_dtype(PyObject *options, const char *key, bool takes_bytes, uint32_t *dtype)
{
    const char *text = get_text(options, key);
    if (!text)
        return -1;
    *dtype = strcmp(text, "auto") == 0 ? DTYPE_NONE : dtype_from_name(text);
    if (*dtype == DTYPE_NONE || *dtype == DTYPE_F32 || *dtype == DTYPE_F16 || *dtype == DTYPE_BF16)
        return 0;
    if (takes_bytes && (*dtype == DTYPE_FP8 || *dtype == DTYPE_I8))
        return 0;
    PyErr_Format(PyExc_ValueError, "%s: wanted auto, float32, float16%s or bfloat16, have %s", key,
                 takes_bytes ? ", fp8, int8" : "", text);
    return -1;
}

static bool get_flag(PyObject *options, const char *key)
{
    PyObject *value = PyDict_GetItemString(options, key);
    return value && PyObject_IsTrue(value) == 1;
}

/* The option `adapters`: most adapters of a step, their largest rank, whether they may change experts, whether embeddings and
 * the head, and whether their factors have values of bfloat16. Without it the model serves none. */
static int parse_adapters(PyObject *options, struct model_options *o)
{
    PyObject *given = PyDict_GetItemString(options, "adapters");
    if (!given || given == Py_None)
        return 0;
    int has_experts = 0, has_embeddings = 0, has_bfloat16 = 0;
    int bad = !PyArg_ParseTuple(given, "IIppp", &o->max_loras, &o->max_lora_rank, &has_experts, &has_embeddings, &has_bfloat16);
    o->has_lora_experts = has_experts;
    o->has_lora_embeddings = has_embeddings;
    o->has_lora_bfloat16 = has_bfloat16;
    return bad ? -1 : 0;
}

/* The option `beside`: bytes of a drafter, and its bytes for each page. Without it the model has no drafter. */
static int parse_beside(PyObject *options, struct model_options *o)
{
    PyObject *given = PyDict_GetItemString(options, "beside");
    unsigned long long n_bytes = 0, page_bytes = 0;
    int bad = given && given != Py_None && !PyArg_ParseTuple(given, "KK", &n_bytes, &page_bytes);
    o->beside_bytes = n_bytes;
    o->beside_page_bytes = page_bytes;
    return bad ? -1 : 0;
}

static struct team *team_of(PyObject *object);

/* The option `lender`: the model whose weights the program borrows. */
static int parse_lender(PyObject *options, struct model_options *o)
{
    PyObject *given = PyDict_GetItemString(options, "lender");
    struct team *team = given && given != Py_None ? team_of(given) : NULL;
    o->weights.lender = team ? model_weights(team_model(team, 0)) : NULL;
    return PyErr_Occurred() ? -1 : 0;
}

/* The option `encoder`: most rows of a piece, and features that the pool holds. */
static int parse_encoder(PyObject *options, struct model_options *o)
{
    PyObject *given = PyDict_GetItemString(options, "encoder");
    if (!given || given == Py_None)
        return 0;
    return PyArg_ParseTuple(given, "II", &o->max_encoder_rows, &o->encoder_cache_tokens) ? 0 : -1;
}

static int parse_options(PyObject *options, struct model_options *o)
{
    PyObject *draft_rows = PyDict_GetItemString(options, "max_draft_rows");
    const char *arithmetic = get_text(options, "activation_dtype");
    o->device = get_text(options, "device");
    PyObject *library = PyDict_GetItemString(options, "library");
    PyObject *cublaslt = PyDict_GetItemString(options, "cublaslt");
    PyObject *share = PyDict_GetItemString(options, "memory_share");
    o->library = library ? PyUnicode_AsUTF8AndSize(library, NULL) : "";
    o->cublaslt = cublaslt ? PyUnicode_AsUTF8AndSize(cublaslt, NULL) : "";
    o->memory_share = share ? PyFloat_AsDouble(share) : 0;
    o->max_draft_rows = draft_rows ? (uint32_t)PyLong_AsUnsignedLong(draft_rows) : 0;
    o->is_eager = get_flag(options, "enforce_eager");
    o->is_synchronous = get_flag(options, "synchronous");
    o->checks_ranks = get_flag(options, "checks_ranks");
    o->has_one_group = get_flag(options, "one_group");
    o->isa = get_text(options, "isa");
    if (!arithmetic || !o->device || !o->library || !o->cublaslt || !o->isa || parse_adapters(options, o) ||
        parse_beside(options, o) || parse_lender(options, o) || parse_encoder(options, o) ||
        get_dtype(options, "dtype", false, &o->weights.dtype) || get_dtype(options, "kv_dtype", true, &o->kv_dtype))
        return -1;
    o->weights.arithmetic = strcmp(arithmetic, "int8") == 0    ? ARITHMETIC_INT8
                            : strcmp(arithmetic, "float") == 0 ? ARITHMETIC_FLOAT
                            : strcmp(arithmetic, "fp8") == 0   ? ARITHMETIC_FP8
                                                               : ARITHMETIC_AUTO;
    if (get_count(options, "num_threads", &o->n_threads) || get_count(options, "block_size", &o->block_tokens) ||
        get_count(options, "max_num_seqs", &o->max_num_seqs) ||
        get_count(options, "max_num_batched_tokens", &o->max_num_batched_tokens) ||
        get_count(options, "max_model_len", &o->max_model_len) || get_number(options, "kv_cache_bytes", &o->kv_cache_bytes))
        return -1;
    PyObject *host_cache = PyDict_GetItemString(options, "host_cache_bytes");
    o->host_cache_bytes = host_cache ? PyLong_AsUnsignedLongLong(host_cache) : 0;
    PyObject *fits = PyMapping_GetItemString(options, "fit_model_len"), *seed = PyMapping_GetItemString(options, "dummy_seed");
    PyObject *mxfp4 = PyMapping_GetItemString(options, "dummy_mxfp4");
    if (fits && seed && mxfp4) {
        o->fits_model_len = PyObject_IsTrue(fits) == 1;
        o->weights.is_dummy = seed != Py_None;
        o->weights.is_mxfp4 = PyObject_IsTrue(mxfp4) == 1;
        o->weights.seed = seed == Py_None ? 0 : PyLong_AsUnsignedLongLong(seed);
    }
    Py_XDECREF(fits);
    Py_XDECREF(seed);
    Py_XDECREF(mxfp4);
    return PyErr_Occurred() ? -1 : 0;
}

/* ---- construction ---------------------------------------------------------------------------------------------------- */

static bool report_progress(void *callback, uint64_t done_bytes, uint64_t total_bytes)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *result = PyErr_CheckSignals() ? NULL : PyObject_CallFunction(callback, "KK", done_bytes, total_bytes);
    bool goes_on = result != NULL;
    Py_XDECREF(result);
    PyGILState_Release(gil);
    return goes_on;
}

/* Parses the program, or the list of the ranks' programs. Returns their number; 0 with an exception set. */
static uint32_t parse_programs(PyObject *spec, struct program **programs)
{
    if (!PyList_Check(spec))
        return (programs[0] = py_program_parse(spec)) != NULL;
    Py_ssize_t n = PyList_Size(spec);
    if (n < 1 || n > (Py_ssize_t)TEAM_MAX_RANKS) {
        PyErr_Format(PyExc_ValueError, "spec: wanted programs of 1 to %u ranks, have %zd", TEAM_MAX_RANKS, n);
        return 0;
    }
    for (Py_ssize_t rank = 0; rank < n; rank++)
        if (!(programs[rank] = py_program_parse(PyList_GetItem(spec, rank)))) {
            while (rank-- > 0)
                program_destroy(programs[rank]);
            return 0;
        }
    return (uint32_t)n;
}

/* The options of each rank: those of the model, with the rank's device from the list `devices`. */
static int spread_options(PyObject *dict, const struct model_options *options, uint32_t n_ranks, struct model_options *ranks)
{
    PyObject *devices = PyDict_GetItemString(dict, "devices");
    for (uint32_t rank = 0; rank < n_ranks; rank++) {
        ranks[rank] = *options;
        PyObject *device = devices ? PySequence_GetItem(devices, (Py_ssize_t)rank) : NULL; /* the options keep it alive */
        ranks[rank].device = devices ? (device ? PyUnicode_AsUTF8AndSize(device, NULL) : NULL) : options->device;
        Py_XDECREF(device);
        if (!ranks[rank].device)
            return -1;
    }
    return 0;
}

/* Long waits for other hosts end with a signal. */
static bool goes_on(void *ctx)
{
    (void)ctx;
    PyGILState_STATE gil = PyGILState_Ensure();
    bool is_quiet = !PyErr_CheckSignals();
    PyGILState_Release(gil);
    return is_quiet;
}

/* Fills the team's hosts from the option `hosts`: (address, port, host, number of hosts, seconds to wait for the others, token,
 * digests, first rank here, number of all ranks, path of NCCL or None). Without it the model is in one process. */
static int parse_hosts(PyObject *dict, struct hosts_options *hosts, struct team_options *team)
{
    PyObject *given = PyDict_GetItemString(dict, "hosts");
    Py_ssize_t n_token, n_digests;
    const char *token, *digests;
    if (!given || given == Py_None)
        return 0;
    *hosts = (struct hosts_options){.patience = {.goes_on = goes_on}, .step_seconds = team->timeout_seconds};
    if (!PyArg_ParseTuple(given, "sHIIdy#y#IIz", &hosts->address, &hosts->port, &hosts->host, &hosts->n_hosts,
                          &hosts->patience.seconds, &token, &n_token, &digests, &n_digests, &team->first_rank,
                          &team->n_all_ranks, &team->nccl))
        return -1;
    if (n_token != sizeof hosts->token || n_digests != sizeof hosts->digests) {
        PyErr_Format(PyExc_ValueError, "hosts: wanted a token of %zu bytes and digests of %zu, have %zd and %zd",
                     sizeof hosts->token, sizeof hosts->digests, n_token, n_digests);
        return -1;
    }
    memcpy(hosts->token, token, sizeof hosts->token);
    memcpy(hosts->digests, digests, sizeof hosts->digests);
    team->hosts = hosts;
    return 0;
}

/* The option `all_programs`: those of all ranks of all hosts. Keeps the ones of ranks on other hosts. */
static int parse_others(PyObject *dict, uint32_t n_ranks, struct team_options *team)
{
    PyObject *given = PyDict_GetItemString(dict, "all_programs");
    if (!team->hosts)
        return 0;
    if (!given || PySequence_Size(given) != (Py_ssize_t)team->n_all_ranks) {
        PyErr_Format(PyExc_ValueError, "all_programs: wanted those of %u ranks", team->n_all_ranks);
        return -1;
    }
    if (!(team->others = mem_calloc(team->n_all_ranks, sizeof *team->others))) {
        PyErr_NoMemory();
        return -1;
    }
    for (uint32_t rank = 0; rank < team->n_all_ranks; rank++) {
        bool is_here = rank >= team->first_rank && rank < team->first_rank + n_ranks;
        PyObject *spec = is_here ? NULL : PySequence_GetItem(given, (Py_ssize_t)rank);
        team->others[rank] = spec ? py_program_parse(spec) : NULL;
        Py_XDECREF(spec);
        if (!is_here && !team->others[rank])
            return -1;
    }
    return 0;
}

static int make_team(Model *object, struct program **programs, uint32_t n_ranks, struct checkpoint *checkpoint, PyObject *dict,
                     const struct model_options *options)
{
    PyObject *seconds = PyDict_GetItemString(dict, "step_timeout_s");
    struct team_options team = {.n_ranks = n_ranks, .timeout_seconds = seconds ? PyFloat_AsDouble(seconds) : 30};
    struct hosts_options hosts;
    struct model_options ranks[TEAM_MAX_RANKS];
    if (PyErr_Occurred() || parse_hosts(dict, &hosts, &team) || parse_others(dict, n_ranks, &team) ||
        spread_options(dict, options, n_ranks, ranks)) {
        for (uint32_t rank = 0; rank < n_ranks; rank++)
            program_destroy(programs[rank]);
        for (uint32_t rank = 0; team.others && rank < team.n_all_ranks; rank++)
            program_destroy(team.others[rank]);
        mem_free(team.others);
        return -1;
    }
    struct err err = {0};
    PyThreadState *gil = PyEval_SaveThread();
    enum rc rc = team_create(programs, checkpoint, ranks, &team, &object->team, &err);
    PyEval_RestoreThread(gil);
    if (rc && !PyErr_Occurred())
        py_raise(&err);
    return rc ? -1 : 0;
}

static int model_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"spec", "checkpoint", "options", "on_progress", NULL};
    PyObject *spec, *file, *dict, *callback = Py_None;
    Model *object = (Model *)self;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|O", names, &spec, &file, &dict, &callback))
        return -1;
    if (object->team) {
        PyErr_SetString(PyExc_TypeError, "Model() was initialised before");
        return -1;
    }
    struct model_options options = {0};
    struct checkpoint *checkpoint = NULL;
    if (file != Py_None && !(checkpoint = py_checkpoint_get(file)))
        return -1;
    if (parse_options(dict, &options))
        return -1;
    if (!checkpoint && !options.weights.is_dummy) {
        PyErr_SetString(PyExc_ValueError, "checkpoint: wanted one, or dummy_seed in the options");
        return -1;
    }
    if (callback != Py_None) {
        options.weights.progress = report_progress;
        options.weights.progress_ctx = callback;
    }
    object->max_num_seqs = options.max_num_seqs;
    object->max_num_batched_tokens = options.max_num_batched_tokens;
    struct program *programs[TEAM_MAX_RANKS];
    uint32_t n_ranks = parse_programs(spec, programs);
    return n_ranks ? make_team(object, programs, n_ranks, checkpoint, dict, &options) : -1;
}

PyObject *py_page_bytes(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *spec, *dict;
    struct model_options options = {.n_ranks = 1};
    struct err err = {0};
    uint64_t page_bytes;
    if (!PyArg_ParseTuple(args, "OO", &spec, &dict) || parse_options(dict, &options))
        return NULL;
    struct program *program = py_program_parse(spec);
    if (!program)
        return NULL;
    return model_page_bytes(program, &options, &page_bytes, &err) ? py_raise(&err) : PyLong_FromUnsignedLongLong(page_bytes);
}

static PyObject *model_close(PyObject *self, PyObject *args)
{
    (void)args;
    Model *object = (Model *)self;
    struct team *team = object->team;
    object->team = NULL;
    while (object->n_borrowers) {
        Py_BEGIN_ALLOW_THREADS
        nanosleep(&(struct timespec){0, 200000}, NULL);
        Py_END_ALLOW_THREADS
    }
    PyThreadState *gil = PyEval_SaveThread();
    team_destroy(team);
    PyEval_RestoreThread(gil);
    Py_CLEAR(object->lent);
    Py_RETURN_NONE;
}

static void model_dealloc(PyObject *self)
{
    team_destroy(((Model *)self)->team);
    Py_XDECREF(((Model *)self)->lent);
    py_deallocate(self);
}

static struct team *opened_team(PyObject *self)
{
    struct team *team = ((Model *)self)->team;
    if (!team) {
        struct err err;
        err_set(&err, RC_CLOSED, "engine is closed");
        py_raise(&err);
    }
    return team;
}

/* Rank 0, for what is equal on all ranks. */
static struct model *opened(PyObject *self)
{
    struct team *team = opened_team(self);
    return team ? team_model(team, 0) : NULL;
}

/* The team of an object, or NULL with an exception set if the object is no _core.Model. */
static struct team *team_of(PyObject *object)
{
    if (PyType_GetSlot(Py_TYPE(object), Py_tp_init) == (void *)model_init)
        return opened_team(object);
    PyErr_SetString(PyExc_TypeError, "model: wanted a _core.Model");
    return NULL;
}

struct team *py_model_borrow(PyObject *object)
{
    struct team *team = team_of(object);
    if (team)
        ((Model *)object)->n_borrowers++;
    return team;
}

void py_model_return(PyObject *object)
{
    ((Model *)object)->n_borrowers--;
}

int py_model_keep(PyObject *object, PyObject *name, PyObject *what)
{
    Model *self = (Model *)object;
    if (!self->lent && what)
        self->lent = PyDict_New();
    PyObject *key = name ? name : Py_None, *had = self->lent ? PyDict_GetItemWithError(self->lent, key) : NULL;
    if (PyErr_Occurred() || (what && !self->lent))
        return -1;
    if (!what)
        return had ? PyDict_DelItem(self->lent, key) : 0;
    if (name)
        return PyDict_SetItem(self->lent, key, what);
    PyObject *list = had ? Py_NewRef(had) : PyList_New(0);
    int result = !list || PyList_Append(list, what) < 0 ? -1 : PyDict_SetItem(self->lent, key, list);
    Py_XDECREF(list);
    return result;
}

int py_model_get(PyObject *self, struct model_parts *parts)
{
    struct team *team = team_of(self);
    struct model *model = team ? team_model(team, 0) : NULL;
    if (!team)
        return -1;
    *parts = (struct model_parts){
        .layout = *model_layout(model),
        .n_pages = model_n_pages(model),
        .vocab_size = model_program(model)->vocab_size,
        .max_num_seqs = ((Model *)self)->max_num_seqs,
        .max_num_batched_tokens = ((Model *)self)->max_num_batched_tokens,
        .max_model_len = model_max_len(model),
        .runner = {team, team_start, team_finish, model_is_async(model) && !team_hosts(team), team_allocations,
                   team_read_states, program_states_width(model_program(model)), !program_has_logits(model_program(model)),
                   team_release, team_restore, program_takes_whole_prompts(model_program(model)),
                   program_n_token_types(model_program(model)), team_hosts(team) ? team_check : NULL,
                   model_lora(model)->adapters, model_n_host_slots(model), team_move, team_poll_moves,
                   model_host_slots(model), model_slot_bytes(model)},
    };
    parts->runner.kept = model_kept(model, &parts->runner.kept_width, &parts->runner.kept_stride);
    team_add_lending(team, &parts->runner);
    parts->runner.n_pools = model_program(model)->is_by_data ? team_n_ranks(team) : 1;
    parts->runner.is_head = program_is_head(model_program(model));
    team_add_tower(team, &parts->runner);
    return 0;
}

/* ---- introspection --------------------------------------------------------------------------------------------------- */

static PyObject *memory_of(const struct model *model)
{
    struct model_memory m;
    struct err err = {0};
    if (model_memory(model, &m, &err))
        return py_raise(&err);
    return Py_BuildValue("{sKsKsKsKsKsKsKsKsKsKsKsKsKsK}", "weights", m.weights_bytes, "kv", m.kv_bytes, "activations",
                         m.activations_bytes, "host_cache", m.host_cache_bytes, "sampler", m.sampler_bytes, "staging",
                         m.staging_bytes, "workspaces", m.workspaces_bytes, "graphs", m.graphs_bytes, "pinned_host",
                         m.pinned_bytes, "device_total", m.device_total_bytes, "device_free", m.device_free_bytes,
                         "tower_weights", m.tower_weights_bytes, "tower", m.tower_bytes, "image_features",
                         m.features_bytes);
}

static PyObject *memory(PyObject *self, PyObject *args)
{
    (void)args;
    struct team *team = opened_team(self);
    PyObject *list = team ? PyList_New(0) : NULL;
    for (uint32_t rank = 0; list && rank < team_n_ranks(team); rank++) {
        PyObject *bytes = memory_of(team_model(team, rank));
        if (!bytes || PyList_Append(list, bytes) < 0)
            Py_CLEAR(list);
        Py_XDECREF(bytes);
    }
    return list;
}

/* The rows of a tensor that a rank has, as (first, end, step). */
static PyObject *ranges_of(const struct model *model, const char *name)
{
    const struct program *p = model_program(model);
    PyObject *list = PyList_New(0);
    for (uint32_t w = 0; w < p->n_weights; w++)
        for (uint32_t i = 0; i < p->weights[w].n_parts; i++) {
            const struct weight_part *part = &p->weights[w].parts[i];
            struct row_run run = {0};
            for (uint32_t row = 0; list && row < part->rows && !strcmp(part->name, name); row += run.n_rows) {
                run = layout_run(part, row, UINT64_MAX);
                PyObject *range = Py_BuildValue("(KKK)", (unsigned long long)run.source_row,
                                                (unsigned long long)(run.source_row + (run.n_rows - 1) * run.step + 1),
                                                (unsigned long long)run.step);
                if (!range || PyList_Append(list, range) < 0)
                    Py_CLEAR(list);
                Py_XDECREF(range);
            }
        }
    return list;
}

/* The rows of a tensor on each rank; None: there is one rank. */
static PyObject *shard_of(const struct team *team, const char *name)
{
    if (team_n_ranks(team) == 1)
        return Py_NewRef(Py_None);
    PyObject *list = PyList_New(0);
    for (uint32_t rank = 0; list && rank < team_n_ranks(team); rank++) {
        PyObject *ranges = ranges_of(team_model(team, rank), name);
        if (!ranges || PyList_Append(list, ranges) < 0)
            Py_CLEAR(list);
        Py_XDECREF(ranges);
    }
    return list;
}

static PyObject *part_info(const struct team *team, const struct model *model, uint32_t w, uint32_t i)
{
    const struct weight *weight = &model_program(model)->weights[w];
    const struct weight_part *part = &weight->parts[i];
    const char *dtype =
        weight->kind == WEIGHT_VECTOR ? "float32" : dtype_info(weights_stored(model_weights(model), w, i))->name;
    PyObject *shape = PyTuple_New(part->n_dims);
    for (uint32_t d = 0; shape && d < part->n_dims; d++) {
        PyObject *size = PyLong_FromUnsignedLong(part->dims[d]);
        if (!size || PyTuple_SetItem(shape, d, size) < 0)
            Py_CLEAR(shape);
    }
    PyObject *shard = shape ? shard_of(team, part->name) : NULL;
    if (!shard) {
        Py_XDECREF(shape);
        return NULL;
    }
    return Py_BuildValue("{sssNsssssN}", "name", part->name, "shape", shape, "dtype", dtype, "stored_in", weight->parts[0].name,
                         "shard", shard);
}

/* Adds the tensors of a rank that are not in the dict yet: several parts may come from one tensor. */
static bool add_infos(const struct team *team, const struct model *model, PyObject *by_name)
{
    const struct program *p = model_program(model);
    for (uint32_t w = 0; w < p->n_weights; w++)
        for (uint32_t i = 0; i < p->weights[w].n_parts; i++) {
            const char *name = p->weights[w].parts[i].name;
            if (PyMapping_HasKeyString(by_name, name))
                continue;
            PyObject *info = part_info(team, model, w, i);
            bool is_added = info && PyDict_SetItemString(by_name, name, info) == 0;
            Py_XDECREF(info);
            if (!is_added)
                return false;
        }
    return true;
}

static PyObject *weight_info(PyObject *self, PyObject *args)
{
    (void)args;
    struct team *team = opened_team(self);
    PyObject *by_name = team ? PyDict_New() : NULL, *list = NULL;
    bool is_complete = by_name;
    for (uint32_t rank = 0; is_complete && rank < team_n_ranks(team); rank++)
        is_complete = add_infos(team, team_model(team, rank), by_name);
    if (is_complete)
        list = PyDict_Values(by_name);
    Py_XDECREF(by_name);
    return list;
}

static PyObject *program_text(PyObject *self, PyObject *args)
{
    (void)args;
    struct model *model = opened(self);
    PyObject *list = model ? PyList_New(0) : NULL;
    char text[256];
    for (uint32_t i = 0; list && model_step_text(model, i, text, sizeof text); i++) {
        PyObject *line = PyUnicode_FromString(text);
        if (!line || PyList_Append(list, line) < 0)
            Py_CLEAR(list);
        Py_XDECREF(line);
    }
    return list;
}

static PyObject *describe(PyObject *self, PyObject *args)
{
    (void)args;
    struct model *model = opened(self);
    if (!model)
        return NULL;
    static const char *const arithmetic[] = {"auto", "float", "int8", "bfloat16", "fp8"};
    const struct kv_layout *layout = model_layout(model);
    return Py_BuildValue("{sssssssssIsIsIsKsIsIsKsd}", "device", model_description(model), "on_host", model_on_host(model),
                         "activation_dtype", arithmetic[model_arithmetic(model)], "kv_dtype",
                         dtype_info(model_kv_dtype(model))->name, "max_model_len", model_max_len(model), "num_pages",
                         model_n_pages(model), "num_groups", layout->n_groups, "page_bytes",
                         (unsigned long long)layout->page_bytes, "num_graphs", model_n_graphs(model), "state_pages",
                         layout->n_state_pages, "state_bytes", (unsigned long long)layout->state_bytes, "cache_padding",
                         kv_layout_padding(layout));
}

/* Computes the steps of host 0 until it closes its model. */
static PyObject *follow(PyObject *self, PyObject *args)
{
    (void)args;
    struct err err = {0};
    struct team *team = py_model_borrow(self);
    if (!team)
        return NULL;
    PyThreadState *gil = PyEval_SaveThread();
    enum rc rc = follower_run(team, &err);
    PyEval_RestoreThread(gil);
    py_model_return(self);
    if (!rc)
        Py_RETURN_NONE;
    return PyErr_Occurred() ? NULL : py_raise(&err);
}

static PyMethodDef methods[] = {
    {"memory", memory, METH_NOARGS, "Bytes by purpose, of each rank."},
    {"weight_info", weight_info, METH_NOARGS, "Every named weight: shape, type, and its matrix."},
    {"program", program_text, METH_NOARGS, "The steps that run, one line each."},
    {"adapter_places", py_adapter_places, METH_NOARGS, "Where an adapter's image has the parts of each tensor."},
    {"lend_adapter", py_lend_adapter, METH_VARARGS,
     "lend_adapter(number, address, n_bytes, is_pinned): requests may have the adapter from now on. The image stays until "
     "holds_adapter is false."},
    {"holds_adapter", py_holds_adapter, METH_O, "holds_adapter(number): whether requests or slots may still read the image."},
    {"running_adapters", py_running_adapters, METH_NOARGS, "Numbers of the adapters that sequences run with."},
    {"remove_adapter", py_remove_adapter, METH_O, "Later requests cannot have the adapter."},
    {"tap", py_tap, METH_VARARGS, "Intermediate values of a prompt."},
    {"follow", follow, METH_NOARGS, "Computes the steps of host 0 until it closes its model."},
    {"describe", describe, METH_NOARGS, "The choices made at load."},
    {"close", model_close, METH_NOARGS, "Frees all memory; may be called twice."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_init, (void *)model_init},
    {Py_tp_new, (void *)PyType_GenericNew},
    {Py_tp_dealloc, (void *)model_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_doc, (void *)"A compiled program with its weights on a device."},
    {0, NULL},
};

static PyType_Spec spec = {"llmpy._core.Model", sizeof(Model), 0, Py_TPFLAGS_DEFAULT, slots};

int py_model_register(PyObject *module)
{
    return py_add_type(module, &spec);
}
