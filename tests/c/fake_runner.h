/* fake_runner.h: a runner whose "model" is a hash of everything that a row may see, read back through the tables from a pool of
 * pages as a real one would read keys and values; with or without results that come later than the step is started. */
#ifndef LLMPY_FAKE_RUNNER_H
#define LLMPY_FAKE_RUNNER_H

#include "../../csrc/engine/engine.h"
#include "../../csrc/step/kv_layout.h"
#include "check.h"

#include <math.h>

#define VOCAB 40u
#define MAX_LENGTH 96u
#define MAX_N 4u
#define MAX_ASKED 3u   /* most alternatives that a request may ask for */
#define MAX_TOP (2 * MAX_N) /* candidates of a beam's row */
#define STATES_WIDTH 3u

static const char *const TOKEN_TEXTS[VOCAB] = {
    "a", "b", "c", "d", "ab", "ba", "abc", "", "aa", "bb", "ca", "x", "y", "z", "xy", "yx", "\xc3", "\xa9", "\xc3\xa9", " ",
    "a ", " b", "cab", "xyz", "q", "r", "s", "t", "u", "v", "w", "A", "B", "C", "<s>", "</s>", "zz", "zy", "k", "l",
};
static const int32_t EOS[2] = {35, 12};
static const int32_t SPECIAL[2] = {34, 35};
static const int32_t BANNED[1] = {24};
#define VOCAB_LIMIT 39u

static uint64_t mix(uint64_t a, uint64_t b)
{
    uint64_t state = a * 0x9e3779b97f4a7c15u ^ b;
    return check_random(&state);
}

/* ---- the model ---- */

struct cell {
    int32_t token, position;
    uint32_t group;
    uint64_t deep, stamp; /* deep: what a second layer would store */
};

/* A batch that was started: its logits are computed; its samples are drawn only when they are needed. */
struct fake_flight {
    struct batch *batch;
    uint64_t *logits;              /* [n_tasks] */
    struct sample_result *results;
    int32_t *top_ids, *top_ranks;
    float *top_values;
    bool is_drawn;
};

/* Recurrent states: every piece is a hash of all tokens before, in one cell of its page. */
#define MAX_STATES 2u
#define MAX_UNITS 8u
#define STATE_GROUP 99u
struct fake_states {
    uint32_t n;
    struct kv_need needs[MAX_STATES];
    struct kv_place places[MAX_STATES];
};

/* Moves that are not carried out yet, by way: a ring of calls. */
#define MOVE_CALLS 32u
struct fake_moves {
    struct page_move *moves[MOVE_CALLS]; /* [n], allocated */
    uint32_t n[MOVE_CALLS];
    const struct cell *source[MOVE_CALLS]; /* pool of another fake; NULL: the slots */
    uint64_t number[MOVE_CALLS], after[MOVE_CALLS];
    uint64_t first, end;                 /* calls first .. end wait; both only grow */
    uint64_t ended;                      /* number of the last call that was carried out */
};

struct fake {
    struct kv_layout layout;
    struct fake_states states;
    uint64_t *all_row_states, *row_states; /* [max_rows] of the last step: what each row makes of its states */
    uint32_t n_pages;
    struct cell *pools;    /* [n_parts][n_pages][block_tokens] */
    uint32_t n_parts, part; /* part: of the batch that is computed, with `pool` and its rows in `row_states` */
    struct cell *pool;     /* [n_pages][block_tokens] */
    bool has_nan;          /* some histories give non-finite logits */
    bool takes_whole_prompts;
    bool only_beams, no_beams; /* every random request that generates is a beam search, or none is */
    bool is_async;         /* results come with `finish`; until then they are wrong */
    struct fake_flight flights[2], *last; /* last: the step started last */
    uint32_t n_in_flight, n_most_in_flight;
    uint64_t n_runs, fails_at, n_rows, n_copies;
    uint64_t weights;      /* mixed into all that they compute */
    uint64_t copy;         /* of sleeping weights */
    uint32_t asleep, no_room_for; /* of enum sleep_part */
    uint64_t n_releases, n_restores;
    struct cell *slots;    /* [n_host_slots][block_tokens] host memory; NULL: none */
    struct fake_moves moves[2];
    uint64_t move_random, n_moves[2];
    double move_s;                 /* seconds that the copy of a page is said to take */
    struct engine *engine; /* for a test of the busy flag */
    enum rc busy;
};

/* Gives the cell of a visible position. */
typedef const struct cell *fetch_fn(const void *ctx, uint32_t group, uint32_t position);

static uint64_t attend(const struct kv_layout *layout, fetch_fn *fetch, const void *ctx, uint32_t position, bool deep)
{
    uint64_t hash = mix(position, deep);
    for (uint32_t g = 0; g < layout->n_groups; g++) {
        uint32_t window = layout->groups[g].window;
        for (uint32_t j = window && position + 1 > window ? position + 1 - window : 0; j <= position; j++) {
            const struct cell *cell = fetch(ctx, g, j);
            hash = mix(hash, deep ? cell->deep : (uint64_t)cell->token);
        }
    }
    return hash;
}

/* The pieces of all states behind one more token, folded into a number that layers and logits depend on. */
static uint64_t next_states(const struct fake_states *states, uint64_t units[MAX_STATES][MAX_UNITS], uint64_t token)
{
    uint64_t hash = 0;
    for (uint32_t l = 0; states && l < states->n; l++)
        for (uint32_t u = 0; u < states->needs[l].n_units; u++) {
            units[l][u] = mix(units[l][u] + l, token + u);
            hash = mix(hash, units[l][u]);
        }
    return hash;
}

/* What a draw depends on, gathered from a task or, by the oracle, from a request. */
struct draw {
    uint64_t logits, random, settings, seen, bias;
    bool is_banned[VOCAB];
    bool wants_logprobs, has_nan;
    uint32_t n_top;
};

static uint64_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Different ids that are not banned, best first. The values are multiples of 1/64, so that sums of beams may tie. */
static void fake_top(uint64_t hash, const bool *is_banned, uint32_t n, int32_t *ids, float *values, int32_t *ranks)
{
    bool is_used[VOCAB] = {false};
    float value = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t id = (uint32_t)(mix(hash, i) % VOCAB), tried = 0;
        for (; tried < VOCAB && (is_used[id] || (is_banned && is_banned[id])); tried++)
            id = (id + 1) % VOCAB;
        value -= (float)(1 + mix(hash, i + 100) % 64) / 64;
        is_used[id] = true;
        ids[i] = tried < VOCAB ? (int32_t)id : (int32_t)VOCAB;
        values[i] = tried < VOCAB ? value : -INFINITY;
        ranks[i] = (int32_t)i + 1;
    }
}

static struct sample_result fake_result(uint64_t hash, int32_t id, bool wants_logprobs)
{
    struct sample_result result = {.id = id};
    if (wants_logprobs) {
        uint64_t h = mix(hash, (uint64_t)id);
        result.raw = -(float)(h & 4095) / 64;
        result.full = -(float)(h >> 12 & 4095) / 64;
        result.processed = -(float)(h >> 24 & 4095) / 64;
        result.kept_mass = (float)(h >> 36 & 4095) / 4096;
        result.rank = (int32_t)(h >> 48 & 31) + 1;
    }
    return result;
}

static struct sample_result fake_draw(const struct draw *draw, int32_t *top_ids, float *top_values, int32_t *top_ranks)
{
    uint64_t hash = mix(mix(mix(draw->logits, draw->random), draw->settings), mix(draw->seen, draw->bias));
    uint32_t id = (uint32_t)(hash % VOCAB), tried = 0;
    if (draw->has_nan && draw->logits % 97 == 0)
        return (struct sample_result){.status = SAMPLE_NON_FINITE};
    for (; tried < VOCAB && draw->is_banned[id]; tried++)
        id = (id + 1) % VOCAB;
    if (tried == VOCAB)
        return (struct sample_result){.status = SAMPLE_NONE_ALLOWED};
    fake_top(hash, draw->is_banned, draw->n_top, top_ids, top_values, top_ranks);
    return fake_result(hash, (int32_t)id, draw->wants_logprobs);
}

static struct sample_result fake_score(uint64_t logits, int32_t target, float temperature, uint32_t mode, uint32_t n_top, bool has_nan,
                                       int32_t *top_ids, float *top_values, int32_t *top_ranks)
{
    uint64_t hash = mix(mix(logits, bits_of(temperature)), mode);
    if (has_nan && logits % 97 == 0)
        return (struct sample_result){.status = SAMPLE_NON_FINITE};
    fake_top(hash, NULL, n_top, top_ids, top_values, top_ranks);
    return fake_result(hash, target, true);
}

static uint64_t settings_hash(bool is_greedy, float temperature, float top_p, float min_p, uint32_t top_k, float repetition, float presence,
                              float frequency, uint32_t mode)
{
    return mix(mix(bits_of(temperature) ^ is_greedy, bits_of(top_p)), mix(mix(bits_of(min_p), top_k), mode)) ^
           mix(bits_of(repetition), mix(bits_of(presence), bits_of(frequency)));
}

static uint64_t seen_hash(int32_t id, uint32_t count, bool in_prompt)
{
    return mix((uint64_t)id, count * 2 + in_prompt); /* summed: the list's order means nothing */
}

static float fake_state(uint64_t logits, uint32_t column, bool has_nan)
{
    return has_nan && logits % 97 == 0 ? NAN : (float)(mix(logits, column) % 4096) / 64 - 32;
}

/* A row's type changes its own states alone. */
static uint64_t of_type(uint64_t logits, int32_t type)
{
    return logits ^ ((uint64_t)type << 20);
}

/* ---- the runner ---- */

struct view_of_batch {
    const struct fake *fake;
    const struct batch *batch;
    uint32_t seq;
};

static struct cell *cell_at(const struct view_of_batch *view, uint32_t group, uint32_t position)
{
    uint32_t bt = view->fake->layout.block_tokens;
    int32_t page = page_tables_row(view->batch->tables, group, view->seq)[position / bt];
    return &view->fake->pool[(size_t)page * bt + position % bt];
}

static const struct cell *fetch_from_pool(const void *ctx, uint32_t group, uint32_t position)
{
    const struct cell *cell = cell_at(ctx, group, position);
    if (cell->position != (int32_t)position || cell->group != group || !cell->stamp)
        CHECK_FAIL("group %u position %u is visible, the page holds position %d of group %u", group, position, cell->position, cell->group);
    return cell;
}

static void fake_copy(struct fake *fake, const struct batch *b)
{
    uint32_t bt = fake->layout.block_tokens;
    for (uint32_t i = 0; i < b->n_copies; i++) {
        struct page_copy copy = b->copies[i];
        for (uint32_t j = 0; j < b->n_copies; j++)
            if (b->copies[j].source == copy.target || (j != i && b->copies[j].target == copy.target))
                CHECK_FAIL("page %d is copied to twice, or to and from", copy.target);
        memcpy(&fake->pool[(size_t)copy.target * bt], &fake->pool[(size_t)copy.source * bt], bt * sizeof *fake->pool);
    }
}

static int32_t fake_token(const struct fake *fake, const struct batch *b, uint32_t row)
{
    int32_t id = b->token_ids[row];
    CHECK(id < (int32_t)VOCAB);
    if (id >= 0)
        return id;
    CHECK(fake->last && fake->last->is_drawn);
    const struct batch *last = fake->last->batch;
    uint32_t task = (uint32_t)(-1 - id) + (last->n_parts ? last->parts[fake->part].first_task : 0);
    CHECK(!last->tasks[task].is_score && (!last->n_parts || (uint32_t)(-1 - id) < last->parts[fake->part].n_tasks));
    return fake->last->results[task].status ? 0 : fake->last->results[task].id;
}

static void fake_write(struct fake *fake, const struct batch *b)
{
    for (uint32_t s = 0; s < b->n_seqs; s++)
        for (int32_t row = b->seq_first_row[s]; row < b->seq_first_row[s + 1]; row++) {
            struct view_of_batch view = {fake, b, (uint32_t)b->row_seq[row]};
            CHECK_EQ(b->row_seq[row], b->row_seq[b->seq_first_row[s]]);
            CHECK(b->seq_first_row[s] < b->seq_first_row[s + 1]);
            CHECK(row == b->seq_first_row[s] || b->positions[row] == b->positions[row - 1] + 1);
            for (uint32_t g = 0; g < fake->layout.n_groups; g++) {
                struct cell *cell = cell_at(&view, g, (uint32_t)b->positions[row]);
                CHECK(cell >= fake->pool + fake->layout.block_tokens); /* not the reserved page */
                CHECK(cell->stamp != fake->n_runs);                    /* no other row writes here in this step */
                *cell = (struct cell){fake_token(fake, b, (uint32_t)row), b->positions[row], g, 0, fake->n_runs};
            }
        }
}

static struct cell *state_cell(const struct fake *fake, const struct batch *b, uint32_t seq, uint32_t layer, uint32_t unit)
{
    uint32_t a_page = (uint32_t)(fake->layout.page_bytes / fake->states.needs[layer].unit_bytes);
    int32_t page = page_tables_row(b->tables, fake->layout.n_groups, seq)[fake->states.places[layer].index + unit / a_page];
    return &fake->pool[(size_t)page * fake->layout.block_tokens + unit % a_page];
}

/* Advances the states of every sequence over its rows; a sequence with its first row at position 0 starts from zeros. */
static void fake_recur(struct fake *fake, const struct batch *b)
{
    for (uint32_t s = 0; s < b->n_seqs && fake->states.n; s++) {
        int32_t row = b->seq_first_row[s], first = b->positions[row];
        uint32_t seq = (uint32_t)b->row_seq[row];
        uint64_t units[MAX_STATES][MAX_UNITS] = {{0}};
        for (uint32_t l = 0; l < fake->states.n; l++)
            for (uint32_t u = 0; u < fake->states.needs[l].n_units; u++) {
                const struct cell *cell = state_cell(fake, b, seq, l, u);
                CHECK(cell >= fake->pool + fake->layout.block_tokens);
                CHECK(cell->stamp != fake->n_runs); /* no other row writes here in this step */
                if (first && (cell->position != first - 1 || cell->group != STATE_GROUP || !cell->stamp))
                    CHECK_FAIL("the state behind position %d is wanted, the page holds that of position %d of group %u", first - 1,
                               cell->position, cell->group);
                units[l][u] = first ? cell->deep : 0;
            }
        for (; row < b->seq_first_row[s + 1]; row++)
            fake->row_states[row] = next_states(&fake->states, units, (uint64_t)fake_token(fake, b, (uint32_t)row) ^ fake->weights);
        for (uint32_t l = 0; l < fake->states.n; l++)
            for (uint32_t u = 0; u < fake->states.needs[l].n_units; u++)
                *state_cell(fake, b, seq, l, u) =
                    (struct cell){-1, b->positions[row - 1], STATE_GROUP, units[l][u], fake->n_runs};
    }
}

static void fake_attend(struct fake *fake, const struct batch *b)
{
    for (uint32_t row = 0; row < b->n_rows; row++) {
        struct view_of_batch view = {fake, b, (uint32_t)b->row_seq[row]};
        uint32_t position = (uint32_t)b->positions[row];
        uint64_t deep = attend(&fake->layout, fetch_from_pool, &view, position, false) ^ fake->weights ^ fake->row_states[row];
        for (uint32_t g = 0; g < fake->layout.n_groups; g++)
            cell_at(&view, g, position)->deep = deep;
    }
}

static struct draw draw_of_task(const struct fake *fake, const struct batch *b, const struct sample_task *t, uint64_t logits)
{
    struct draw draw = {.logits = logits, .wants_logprobs = t->wants_logprobs, .has_nan = fake->has_nan, .n_top = t->n_top};
    draw.random = t->is_greedy ? 0 : mix(mix(t->seed, t->sample_index), t->position);
    draw.settings = settings_hash(t->is_greedy, t->temperature, t->top_p, t->min_p, t->top_k, t->repetition_penalty, t->presence_penalty,
                                  t->frequency_penalty, t->mode);
    for (uint32_t i = 0; i < t->n_seen; i++)
        draw.seen += seen_hash(t->seen[i].id, t->seen[i].count, t->seen[i].in_prompt);
    for (uint32_t i = 0; i < t->n_bias; i++)
        draw.bias += mix((uint64_t)t->bias[i].id, bits_of(t->bias[i].value));
    for (uint32_t id = 0; id < VOCAB; id++)
        draw.is_banned[id] = t->n_allowed || id >= b->vocab_limit || (t->mask && !(t->mask[id / 32] >> id % 32 & 1));
    for (uint32_t i = 0; i < t->n_allowed; i++)
        draw.is_banned[t->allowed[i]] = (uint32_t)t->allowed[i] >= b->vocab_limit;
    for (uint32_t i = 0; i < t->n_banned; i++)
        draw.is_banned[t->banned[i]] = true;
    for (uint32_t i = 0; i < b->n_banned; i++)
        draw.is_banned[b->banned[i]] = true;
    return draw;
}

/* The draws of a step, as late as can be: lists that changed since it was scheduled would show. */
static void fake_sample(const struct fake *fake, struct fake_flight *flight)
{
    const struct batch *b = flight->batch;
    for (uint32_t t = 0; t < b->n_tasks && !flight->is_drawn; t++) {
        const struct sample_task *task = &b->tasks[t];
        int32_t *ids = flight->top_ids + task->top_offset, *ranks = flight->top_ranks + task->top_offset;
        float *values = flight->top_values + task->top_offset;
        uint64_t logits = flight->logits[t];
        struct draw draw = draw_of_task(fake, b, task, logits);
        flight->results[t] =
            task->is_score ? fake_score(logits, task->target, task->temperature, task->mode, task->n_top, fake->has_nan, ids, values, ranks)
                           : fake_draw(&draw, ids, values, ranks);
    }
    flight->is_drawn = true;
}

static void fake_lay(struct fake_flight *flight, const struct batch *b)
{
    if (flight->logits)
        return;
    flight->logits = calloc(b->max_tasks, sizeof *flight->logits);
    flight->results = calloc(b->max_tasks, sizeof *flight->results);
    flight->top_ids = calloc((size_t)b->max_tasks * MAX_TOP, sizeof *flight->top_ids);
    flight->top_ranks = calloc((size_t)b->max_tasks * MAX_TOP, sizeof *flight->top_ranks);
    flight->top_values = calloc((size_t)b->max_tasks * MAX_TOP, sizeof *flight->top_values);
}

static void fake_logits(const struct fake *fake, const struct batch *b, uint64_t *logits, uint32_t n_top)
{
    for (uint32_t t = 0; t < b->n_tasks; t++) {
        const struct sample_task *task = &b->tasks[t];
        uint32_t row = (uint32_t)b->logits_rows[task->logits_row];
        struct view_of_batch view = {fake, b, (uint32_t)b->row_seq[row]};
        logits[t] =
            attend(&fake->layout, fetch_from_pool, &view, (uint32_t)b->positions[row], true) ^ fake->weights ^ fake->row_states[row];
        CHECK(!t || task->logits_row >= b->tasks[t - 1].logits_row);
        CHECK_EQ(task->top_offset, n_top);
        CHECK_EQ(task->position, b->positions[row] + 1);
        n_top += task->n_top;
        b->results[t] = (struct sample_result){.id = -7, .status = 99};
    }
}

/* Carries out the oldest call of one way, after the calls that it waits for. */
static void fake_move_next(struct fake *fake, enum move_way way)
{
    struct fake_moves *own = &fake->moves[way];
    uint32_t at = own->first++ % MOVE_CALLS, bt = fake->layout.block_tokens;
    while (fake->moves[!way].first < fake->moves[!way].end && fake->moves[!way].ended < own->after[at])
        fake_move_next(fake, !way);
    for (uint32_t i = 0; i < own->n[at]; i++) {
        struct cell *page = &fake->pool[(size_t)own->moves[at][i].page * bt], *slot = &fake->slots[(size_t)own->moves[at][i].slot * bt];
        const struct cell *from = own->source[at] ? &own->source[at][(size_t)own->moves[at][i].slot * bt] : slot;
        memcpy(way == MOVE_OUT ? slot : page, way == MOVE_OUT ? page : from, bt * sizeof *page);
    }
    fake->n_moves[way] += own->n[at];
    own->ended = own->number[at];
    free(own->moves[at]);
}

static void fake_end_moves(struct fake *fake, enum move_way way, uint64_t number)
{
    while (fake->moves[way].first < fake->moves[way].end && fake->moves[way].ended < number)
        fake_move_next(fake, way);
}

/* Moves are carried out as late as possible: when somebody waits for them, or by chance when somebody asks. Until then the pages
 * to be filled have nothing that can be read. */
static enum rc fake_move(void *ctx, struct move_args *args, struct err *err)
{
    struct fake *fake = ctx;
    uint32_t bt = fake->layout.block_tokens;
    (void)err;
    for (uint32_t way = MOVE_OUT; way <= MOVE_IN; way++) {
        struct fake_moves *own = &fake->moves[way];
        const struct move_list *list = &args->lists[way];
        if (own->end - own->first == MOVE_CALLS)
            fake_move_next(fake, way);
        uint32_t at = own->end++ % MOVE_CALLS;
        own->moves[at] = malloc((list->n_moves + 1) * sizeof *list->moves);
        own->n[at] = list->n_moves;
        own->number[at] = list->number;
        own->after[at] = list->after;
        own->source[at] = way == MOVE_IN && args->source ? ((const struct lent_pools *)args->source)->pools[0] : NULL;
        for (uint32_t i = 0; i < list->n_moves; i++) {
            own->moves[at][i] = list->moves[i];
            CHECK(list->moves[i].page > 0 && (uint32_t)list->moves[i].page < fake->n_pages);
        }
    }
    for (uint32_t way = MOVE_OUT; way <= MOVE_IN; way++)
        fake_end_moves(fake, way, args->awaited[way]);
    for (uint64_t call = fake->moves[MOVE_IN].first; call < fake->moves[MOVE_IN].end; call++)
        for (uint32_t i = 0; i < fake->moves[MOVE_IN].n[call % MOVE_CALLS]; i++) {
            int32_t page = fake->moves[MOVE_IN].moves[call % MOVE_CALLS][i].page;
            bool is_read = false; /* by a move out that has to come first */
            for (uint64_t out = fake->moves[MOVE_OUT].first; out < fake->moves[MOVE_OUT].end; out++)
                for (uint32_t j = 0; j < fake->moves[MOVE_OUT].n[out % MOVE_CALLS]; j++)
                    is_read |= fake->moves[MOVE_OUT].moves[out % MOVE_CALLS][j].page == page;
            for (uint32_t j = 0; j < bt && !is_read; j++)
                fake->pool[(size_t)page * bt + j].stamp = 0;
        }
    return RC_OK;
}

static enum rc fake_poll_moves(void *ctx, struct move_state *state, struct err *err)
{
    struct fake *fake = ctx;
    (void)err;
    *state = (struct move_state){0};
    for (uint32_t way = MOVE_OUT; way <= MOVE_IN; way++) {
        if (fake->moves[way].first < fake->moves[way].end && mix(fake->move_random++, way) % 3 == 0)
            fake_move_next(fake, way);
        state->ended[way] = fake->moves[way].ended;
        state->bytes[way] = fake->n_moves[way] * fake->layout.page_bytes;
        state->seconds[way] = (double)fake->n_moves[way] * fake->move_s;
    }
    return RC_OK;
}

static enum rc fake_lend(void *ctx, void *reader, struct lent_pools *pools, struct err *err)
{
    (void)reader, (void)err;
    pools->pools[0] = ((struct fake *)ctx)->pool;
    return RC_OK;
}

/* Pages, tokens of the step before and rows are those of the part from here on. */
static void fake_use_part(struct fake *fake, const struct batch *b, uint32_t part)
{
    fake->part = part;
    fake->pool = fake->pools + (size_t)part * fake->n_pages * fake->layout.block_tokens;
    fake->row_states = fake->all_row_states + (b->n_parts ? b->parts[part].first_row : 0);
}

/* Computes a batch, or each of its parts as a batch of its own. */
static void fake_compute(struct fake *fake, const struct batch *whole, struct fake_flight *flight)
{
    uint32_t n_rows = 0, n_seqs = 0, n_tasks = 0, n_copies = 0, n_wanted = 0, n = whole->n_parts ? whole->n_parts : 1;
    CHECK(n == fake->n_parts);
    for (uint32_t i = 0; i < n; i++) {
        const struct batch b = whole->n_parts ? batch_part_of(whole, i) : *whole;
        uint32_t first_task = n_tasks, n_top = first_task ? whole->tasks[first_task - 1].top_offset + whole->tasks[first_task - 1].n_top : 0;
        fake_use_part(fake, whole, i);
        CHECK_EQ(b.seq_first_row[0], 0);
        CHECK_EQ(b.seq_first_row[b.n_seqs], b.n_rows);
        for (uint32_t row = 0; row < b.n_rows && whole->n_parts; row++)
            CHECK_EQ(whole->row_part[n_rows + row], i);
        CHECK(!whole->n_parts || (whole->parts[i].first_row == n_rows && whole->parts[i].first_wanted == n_wanted));
        fake_copy(fake, &b);
        fake_write(fake, &b);
        fake_recur(fake, &b);
        fake_attend(fake, &b);
        fake_logits(fake, &b, flight->logits + first_task, n_top);
        n_rows += b.n_rows;
        n_seqs += b.n_seqs;
        n_tasks += b.n_tasks;
        n_copies += b.n_copies;
        n_wanted += b.n_logits_rows + b.n_state_rows;
    }
    CHECK(n_rows == whole->n_rows && n_seqs == whole->n_seqs && n_tasks == whole->n_tasks && n_copies == whole->n_copies);
    fake_use_part(fake, whole, 0);
}

static enum rc fake_start(void *ctx, struct batch *b, struct err *err)
{
    struct fake *fake = ctx;
    fake->n_runs++;
    fake->n_rows += b->n_rows;
    fake->n_copies += b->n_copies;
    if (fake->n_runs == fake->fails_at)
        return err_set(err, RC_DEVICE, "the device is on fire");
    if (fake->engine) {
        bool progressed;
        fake->busy = engine_step(fake->engine, &progressed, NULL);
    }
    CHECK_EQ(fake->asleep, 0);
    CHECK(b->n_rows > 0 && b->n_rows <= b->max_rows && b->n_seqs <= b->max_seqs && b->n_tasks <= b->max_tasks);
    CHECK(b->n_parts || b->seq_first_row[b->n_seqs] == (int32_t)b->n_rows);
    CHECK_EQ(b->slot, (fake->n_runs - 1) % 2);
    for (uint32_t i = 0; fake->takes_whole_prompts && i < b->n_seqs; i++)
        CHECK_EQ(b->positions[b->seq_first_row[i]], 0);
    struct fake_flight *flight = &fake->flights[b->slot];
    fake_lay(flight, b);
    flight->batch = b;
    flight->is_drawn = false;
    if (fake->last && !fake->last->is_drawn)
        fake_sample(fake, fake->last);
    if (!fake->all_row_states)
        fake->row_states = fake->all_row_states = calloc(b->max_rows, sizeof *fake->row_states);
    fake_compute(fake, b, flight);
    fake->last = flight;
    fake->n_in_flight++;
    fake->n_most_in_flight = fake->n_in_flight > fake->n_most_in_flight ? fake->n_in_flight : fake->n_most_in_flight;
    if (b->has_masks)
        b->await_masks(b->masks_ctx);
    return RC_OK;
}

static enum rc fake_finish(void *ctx, struct batch *b, struct err *err)
{
    struct fake *fake = ctx;
    struct fake_flight *flight = &fake->flights[b->slot];
    if (fake->n_runs + 1 == fake->fails_at && fake->is_async)
        return err_set(err, RC_DEVICE, "the device is on fire");
    CHECK(flight->batch == b && fake->n_in_flight);
    fake_sample(fake, flight);
    fake->n_in_flight--;
    for (uint32_t t = 0; t < b->n_tasks; t++) {
        uint32_t n = b->tasks[t].n_top, at = b->tasks[t].top_offset;
        b->results[t] = flight->results[t];
        memcpy(b->top_ids + at, flight->top_ids + at, n * sizeof *b->top_ids);
        memcpy(b->top_values + at, flight->top_values + at, n * sizeof *b->top_values);
        memcpy(b->top_ranks + at, flight->top_ranks + at, n * sizeof *b->top_ranks);
    }
    return RC_OK;
}

/* What is given back is overwritten: whoever reads it later sees cells without a stamp, or draws other tokens. */
static enum rc fake_release(void *ctx, uint32_t parts, bool keeps, struct err *err)
{
    struct fake *fake = ctx;
    if (fake->no_room_for & parts)
        return err_set(err, RC_DEVICE_MEMORY, "no room on the host");
    CHECK_EQ(fake->n_in_flight, 0);
    fake->n_releases++;
    if (parts & PART_POOL)
        memset(fake->pools, 0, (size_t)fake->n_parts * fake->n_pages * fake->layout.block_tokens * sizeof *fake->pool);
    if (parts & PART_WEIGHTS) {
        fake->copy = !keeps ? 0xbad : fake->weights;
        fake->weights = 0xbad;
    }
    fake->asleep |= parts;
    return RC_OK;
}

static enum rc fake_restore(void *ctx, uint32_t parts, struct err *err)
{
    struct fake *fake = ctx;
    if (fake->no_room_for & parts)
        return err_set(err, RC_DEVICE_MEMORY, "no room on the device");
    CHECK_EQ(parts & ~fake->asleep, 0);
    fake->n_restores++;
    if (parts & PART_WEIGHTS)
        fake->weights = fake->copy;
    fake->asleep &= ~parts;
    return RC_OK;
}

/* Like a real runner, which has states only of the last step: no other step may have been started since. */
static enum rc fake_read_states(void *ctx, const struct batch *whole, uint32_t first, uint32_t n, float *rows, struct err *err)
{
    struct fake *fake = ctx;
    uint32_t part = batch_find_state(whole, &first);
    const struct batch own = whole->n_parts ? batch_part_of(whole, part) : *whole, *b = &own;
    (void)err;
    fake_use_part(fake, whole, part);
    CHECK(fake->last == &fake->flights[b->slot] && !fake->n_in_flight && first + n <= b->n_state_rows);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t row = (uint32_t)b->logits_rows[b->n_logits_rows + first + i];
        struct view_of_batch view = {fake, b, (uint32_t)b->row_seq[row]};
        uint64_t logits = attend(&fake->layout, fetch_from_pool, &view, (uint32_t)b->positions[row], true) ^ fake->row_states[row];
        for (uint32_t c = 0; c < STATES_WIDTH; c++)
            rows[i * STATES_WIDTH + c] = fake_state(of_type(logits, b->has_types ? b->token_types[row] : 0), c, fake->has_nan);
    }
    fake_use_part(fake, whole, 0);
    return RC_OK;
}

#endif
