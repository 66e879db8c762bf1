#include "layout.h"

#include "../base/mem.h"

static bool has_op(const struct program *p, uint32_t code)
{
    for (uint32_t i = 0; i < p->n_ops; i++)
        if (p->ops[i].code == code)
            return true;
    return false;
}

bool program_has_logits(const struct program *p)
{
    return has_op(p, OP_LOGITS);
}

bool program_takes_whole_prompts(const struct program *p)
{
    return has_op(p, OP_ROW_ATTENTION);
}

uint32_t program_kept_width(const struct program *p)
{
    uint32_t width = 0;
    for (uint32_t i = 0; i < p->n_ops; i++) {
        const struct op *op = &p->ops[i];
        uint32_t end = op->code == OP_KEEP ? op->keep.first + p->values[op->in[0]].width : 0;
        width = end > width ? end : width;
    }
    return width;
}

bool program_is_head(const struct program *p)
{
    return has_op(p, OP_KEPT);
}

uint32_t program_states_width(const struct program *p)
{
    const struct op *last = &p->ops[p->n_ops - 1];
    return last->code == OP_STATES ? p->values[last->in[0]].width : 0;
}

uint32_t program_n_token_types(const struct program *p)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < p->n_ops; i++) {
        const struct op *op = &p->ops[i];
        bool has_types = op->code == OP_EMBED && op->embed.source == EMBED_TYPES;
        uint32_t rows = has_types ? p->weights[op->weight[0]].rows - op->embed.first_row : 0;
        if (rows && (!n || rows < n))
            n = rows;
    }
    return n;
}

uint32_t program_spans(const struct program *p)
{
    uint32_t spans = 0;
    for (uint32_t i = 0; i < p->n_ops; i++)
        if (p->ops[i].code == OP_ATTENTION && p->ops[i].attention.spans > spans)
            spans = p->ops[i].attention.spans;
    return spans;
}

uint32_t program_n_axes(const struct program *p)
{
    uint32_t n = 0;
    for (uint32_t r = 0; r < p->n_ropes; r++)
        n = p->ropes[r].n_axes > n ? p->ropes[r].n_axes : n;
    return n;
}

uint32_t row_list_room(uint32_t list)
{
    static const uint8_t rooms[N_ROW_LISTS] = {[ROWS_OF_WINDOWS] = 2, [ROWS_NEAR] = 9, [ROWS_NEAR_HALF] = 3};
    return rooms[list] ? rooms[list] : 1;
}

uint32_t program_row_room(const struct program *p)
{
    uint32_t room = 1;
    for (uint32_t v = 0; v < p->n_values; v++)
        room = p->values[v].list == ROWS_OF_WINDOWS ? row_list_room(ROWS_OF_WINDOWS) : room;
    return room;
}

static bool have_equal_rows(const struct value *a, const struct value *b)
{
    return a->list == b->list && a->per == b->per;
}

/* What an operation of a tower needs besides its own check: values of as many rows. */
static const char *check_tower(const struct program *p, const struct op *op)
{
    if (op->code == OP_ROWS || op->code == OP_GROUP || op->code == OP_MEAN_ROWS || op->out[0] == NO_INDEX)
        return NULL;
    for (uint32_t i = 0; i < OP_INPUTS + OP_OUTPUTS; i++) {
        uint32_t value = i < OP_INPUTS ? op->in[i] : op->out[i - OP_INPUTS];
        if (value != NO_INDEX && !have_equal_rows(&p->values[value], &p->values[op->out[0]]))
            return "inputs and outputs have as many rows";
    }
    return NULL;
}

static const char *check_ropes(const struct program *p)
{
    for (uint32_t r = 0; r < p->n_ropes; r++)
        if (p->is_tower && !p->ropes[r].n_axes)
            return "a tower's rope has axes";
    for (uint32_t r = 0; r < p->n_ropes; r++)
        for (uint32_t i = 0; p->ropes[r].n_axes && i < p->ropes[r].n_freqs; i++)
            if (p->ropes[r].n_axes > MAX_AXES || p->ropes[r].axes[i] < 0 || (uint32_t)p->ropes[r].axes[i] >= p->ropes[r].n_axes)
                return "a rope has at most three axes, and every frequency one of them";
    return NULL;
}

static const char *check_weights(const struct program *p)
{
    for (uint32_t w = 0; w < p->n_weights && !p->is_tower; w++) {
        uint64_t rows = 0;
        for (uint32_t i = 0; i < p->weights[w].n_parts; i++)
            rows += p->weights[w].parts[i].rows;
        if (p->weights[w].values)
            rows += p->weights[w].kind == WEIGHT_VECTOR && !p->weights[w].n_parts ? p->weights[w].rows : 0;
        if (p->weights[w].lent)
            rows += p->weights[w].kind == WEIGHT_MATRIX && !p->weights[w].n_parts ? p->weights[w].rows : 0;
        if (!rows || rows != p->weights[w].rows || !p->weights[w].cols)
            return "a weight's parts add up to its rows";
        if (p->weights[w].has_unit_rows && p->weights[w].kind != WEIGHT_MATRIX)
            return "rows with a length are those of a matrix";
        for (uint32_t i = 0; i < p->weights[w].n_parts; i++) {
            if (p->weights[w].parts[i].is_constant && p->weights[w].kind != WEIGHT_VECTOR)
                return "constants are parts of vectors";
            const char *fault = layout_fault(&p->weights[w], &p->weights[w].parts[i]);
            if (fault)
                return fault;
        }
    }
    for (uint32_t l = 0; l < p->n_layers; l++) {
        const struct cache_layer *layer = &p->layers[l];
        if (!layer->head_dim || !layer->n_heads || (layer->n_kv_heads && layer->n_heads % layer->n_kv_heads))
            return "query heads are a multiple of key heads";
    }
    for (uint32_t s = 0; s < p->n_states; s++)
        if (!p->states[s].n_units || !p->states[s].unit_floats ||
            (uint64_t)p->states[s].n_units * p->states[s].unit_floats > INT32_MAX)
            return "a state has pieces of at least one number, fewer than 2^31 in all";
    for (uint32_t v = 0; v < p->n_values; v++) {
        const struct value *value = &p->values[v];
        if (!value->width)
            return "no value is empty";
        if (value->of != NO_INDEX && (value->of >= v || (uint64_t)value->offset + value->width > p->values[value->of].width))
            return "a column range lies inside its value";
        if (value->room < value->width || (!p->is_of_rank && value->room != value->width))
            return "a value has room for its columns, and more only in a rank's program";
        if (!value->per || value->list >= N_ROW_LISTS || (!p->is_tower && (value->list || value->per != 1)))
            return "a value has the rows of the step, or of a tower's piece or list";
        if (value->of != NO_INDEX && !have_equal_rows(value, &p->values[value->of]))
            return "a column range has the rows of its value";
    }
    return check_ropes(p);
}

static void mark_written(const struct program *p, uint8_t *written, uint32_t value)
{
    written[value] = 1;
    for (uint32_t v = value + 1; v < p->n_values; v++)
        if (p->values[v].of != NO_INDEX && written[p->values[v].of])
            written[v] = 1;
}

/* Marks the outputs of an operation as written. A value of which an operation writes a range is written when its ranges, which
 * come in order, fill it. filled: columns of each value that are written as ranges. */
static const char *write_outputs(const struct program *p, const struct op *op, uint8_t *written, uint32_t *filled)
{
    for (uint32_t o = 0; o < OP_OUTPUTS; o++) {
        if (op->out[o] == NO_INDEX)
            continue;
        const struct value *value = &p->values[op->out[o]];
        if (value->of == NO_INDEX) {
            mark_written(p, written, op->out[o]);
            continue;
        }
        if (p->values[value->of].of != NO_INDEX || value->offset != filled[value->of])
            return "ranges of a value are written in the order of their columns";
        filled[value->of] += value->width;
        written[op->out[o]] = 1;
        if (filled[value->of] == p->values[value->of].width)
            mark_written(p, written, value->of);
    }
    return NULL;
}

enum rc program_check(const struct program *p, struct err *err)
{
    const char *wanted = check_weights(p);
    if (!wanted && p->is_tower && (p->n_layers || p->n_states || p->tower))
        wanted = "a tower has no cache, no state and no tower";
    if (wanted)
        return err_set(err, RC_INVALID, "program: wanted that %s", wanted);
    uint32_t last = p->n_ops ? p->ops[p->n_ops - 1].code : OP_COUNT;
    if (p->is_tower ? last != OP_FEATURES : (last != OP_LOGITS && last != OP_STATES) || !p->vocab_size)
        return err_set(err, RC_INVALID, "program: wanted logits or states as its last operation, or features of a tower");
    uint8_t *written = mem_calloc(p->n_values + 1, 1);
    uint32_t *filled = mem_calloc(p->n_values + 1, sizeof *filled);
    enum rc rc = written && filled ? RC_OK : err_set(err, RC_MEMORY, "program: out of memory");
    for (uint32_t i = 0; i < p->n_ops && !rc; i++) {
        const struct op *op = &p->ops[i];
        if (op->code == OP_LOGITS && i + 1 != p->n_ops && (i + 2 != p->n_ops || last != OP_STATES))
            wanted = "logits come last and once, or right before the states";
        else if (op->code == OP_STATES && i + 1 != p->n_ops)
            wanted = "states come last and once";
        else
            wanted = op_check(p, op, written);
        if (!wanted && p->is_tower)
            wanted = check_tower(p, op);
        if (!wanted)
            wanted = write_outputs(p, op, written, filled);
        if (wanted)
            rc = err_set(err, RC_INVALID, "operation %u (%s): wanted that %s", i, op_name(op->code), wanted);
    }
    mem_free(written);
    mem_free(filled);
    return rc || !p->tower ? rc : program_check(p->tower, err);
}

void program_destroy(struct program *p)
{
    if (!p)
        return;
    program_destroy(p->tower);
    for (uint32_t w = 0; p->weights && !p->is_tower && w < p->n_weights; w++) {
        for (uint32_t i = 0; p->weights[w].parts && i < p->weights[w].n_parts; i++) {
            mem_free(p->weights[w].parts[i].name);
            mem_free(p->weights[w].parts[i].source);
        }
        mem_free(p->weights[w].parts);
        mem_free(p->weights[w].values);
    }
    for (uint32_t r = 0; p->ropes && r < p->n_ropes; r++) {
        mem_free(p->ropes[r].inv_freq);
        mem_free(p->ropes[r].axes);
    }
    for (uint32_t i = 0; p->ignored && i < p->n_ignored; i++)
        mem_free(p->ignored[i]);
    mem_free(p->ignored);
    mem_free(p->architecture);
    mem_free(p->ops);
    mem_free(p->values);
    if (!p->is_tower)
        mem_free(p->weights);
    mem_free(p->ropes);
    mem_free(p->layers);
    mem_free(p->states);
    mem_free(p);
}
