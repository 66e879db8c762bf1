/* Steps as bytes (csrc/step/step_message.c): what is written is read, and no bytes make a step read or write out of bounds. */
#include "check.h"

#include "../../csrc/base/mem.h"
#include "../../csrc/step/step_message.h"

#define STRIDE 6u
#define TABLES 2u

static const struct step_limits LIMITS = {.max_rows = 12, .max_seqs = 4, .max_copies = 8, .n_pages = 50, .vocab_size = 90,
                                          .max_model_len = 96, .n_token_types = 2, .n_tables = TABLES, .stride = STRIDE};

struct side {
    struct page_tables tables;
    struct batch batch;
};

static void side_open(struct side *side)
{
    struct err err;
    REQUIRE_OK(page_tables_create(&side->tables, TABLES, LIMITS.max_seqs, STRIDE, &err));
    REQUIRE_OK(batch_create(&side->batch, &side->tables, LIMITS.max_rows, 1, LIMITS.max_copies, &err));
}

static void side_close(struct side *side)
{
    batch_destroy(&side->batch);
    page_tables_destroy(&side->tables);
}

/* Two sequences of 1 and 4 rows in the slots 3 and 0. */
static void fill(struct side *side, bool has_types)
{
    static const int32_t firsts[] = {0, 1, 5}, seqs[] = {3, 0, 0, 0, 0}, wanted[] = {0, 4, 2};
    struct batch *b = &side->batch;
    b->n_rows = 5;
    b->n_seqs = 2;
    b->n_logits_rows = 2;
    b->n_state_rows = 1;
    b->has_types = has_types;
    b->shares_new_keys = true;
    b->n_copies = 1;
    b->copies[0] = (struct page_copy){49, 7};
    for (int32_t i = 0; i < 5; i++) {
        b->token_ids[i] = 89 - i;
        b->positions[i] = i ? 91 + i : 0;
        b->token_types[i] = i % 2;
    }
    memcpy(b->row_seq, seqs, sizeof seqs);
    memcpy(b->seq_first_row, firsts, sizeof firsts);
    memcpy(b->logits_rows, wanted, sizeof wanted);
    for (int32_t i = 0; i < 3; i++)
        page_tables_row(&side->tables, 1, 3)[2 + i] = 40 + i;
    page_tables_note(&side->tables, 1, 3, 2, 5);
    page_tables_row(&side->tables, 0, 0)[0] = 9;
    page_tables_note(&side->tables, 0, 0, 0, 1);
}

TEST(what_is_written_is_read)
{
    struct side first = {0}, second = {0};
    struct err err;
    uint64_t step = 0;
    char *bytes = mem_alloc(step_message_most_bytes(&LIMITS));
    side_open(&first);
    side_open(&second);
    for (uint32_t has_types = 0; has_types < 2; has_types++) {
        fill(&first, has_types);
        const struct batch *a = &first.batch, *b = &second.batch;
        size_t n = step_message_write(a, 7 + has_types, bytes);
        CHECK(n <= step_message_most_bytes(&LIMITS) && n < 300);
        REQUIRE_OK(step_message_read(bytes, n, &LIMITS, &second.tables, &second.batch, &step, &err));
        CHECK_EQ(step, 7 + has_types);
        CHECK_EQ(b->slot, (7 + has_types) % 2);
        CHECK(b->n_rows == 5 && b->n_seqs == 2 && b->n_logits_rows == 2 && b->n_state_rows == 1 && b->n_tasks == 0);
        CHECK(b->has_types == has_types && b->shares_new_keys && b->n_copies == 1);
        CHECK(b->copies[0].source == 49 && b->copies[0].target == 7);
        CHECK(!memcmp(a->token_ids, b->token_ids, 20) && !memcmp(a->positions, b->positions, 20));
        CHECK(!memcmp(a->row_seq, b->row_seq, 20) && !memcmp(a->seq_first_row, b->seq_first_row, 12));
        CHECK(!memcmp(a->logits_rows, b->logits_rows, 12));
        CHECK(!has_types || !memcmp(a->token_types, b->token_types, 20));
        CHECK(!memcmp(first.tables.pages, second.tables.pages, sizeof(int32_t) * TABLES * (LIMITS.max_seqs + 1) * STRIDE));
        CHECK_EQ(second.tables.n_runs, 2);
        page_tables_settle(&first.tables);
        page_tables_settle(&second.tables);
        n = step_message_write(a, 9, bytes); /* nothing has changed in the tables */
        REQUIRE_OK(step_message_read(bytes, n, &LIMITS, &second.tables, &second.batch, &step, &err));
        CHECK_EQ(second.tables.n_runs, 0);
    }
    side_close(&first);
    side_close(&second);
    mem_free(bytes);
}

static bool all_below(const int32_t *values, uint32_t n, uint32_t end)
{
    for (uint32_t i = 0; i < n; i++)
        if (values[i] < 0 || (uint32_t)values[i] >= end)
            return false;
    return true;
}

/* What a step relies on. */
static bool is_sound(const struct side *s)
{
    const struct batch *b = &s->batch;
    bool is_in = b->n_rows >= 1 && b->n_rows <= LIMITS.max_rows && b->n_seqs >= 1 && b->n_seqs <= LIMITS.max_seqs &&
                 b->n_copies <= LIMITS.max_copies && b->n_logits_rows + b->n_state_rows <= LIMITS.max_rows;
    if (!is_in || b->seq_first_row[0] || b->seq_first_row[b->n_seqs] != (int32_t)b->n_rows)
        return false;
    for (uint32_t i = 0; i < s->tables.n_runs; i++) {
        const struct table_run *run = &s->tables.runs[i];
        if (run->first / STRIDE != (run->first + run->count - 1) / STRIDE)
            return false;
    }
    for (uint32_t i = 0; i < b->n_seqs; i++)
        if (b->seq_first_row[i] >= b->seq_first_row[i + 1])
            return false;
    return all_below(b->token_ids, b->n_rows, LIMITS.vocab_size) && all_below(b->positions, b->n_rows, LIMITS.max_model_len) &&
           all_below(b->row_seq, b->n_rows, LIMITS.max_seqs) &&
           all_below(b->logits_rows, b->n_logits_rows + b->n_state_rows, b->n_rows) &&
           all_below(&b->copies[0].source, 2 * b->n_copies, LIMITS.n_pages) &&
           (!b->has_types || all_below(b->token_types, b->n_rows, LIMITS.n_token_types)) &&
           all_below(s->tables.pages, TABLES * (LIMITS.max_seqs + 1) * STRIDE, LIMITS.n_pages);
}

/* Copies of exactly n bytes, so that ASan sees a read behind them. */
static enum rc read_exactly(const char *bytes, size_t n, struct side *side)
{
    uint64_t step;
    char *own = mem_alloc(n ? n : 1);
    memcpy(own, bytes, n);
    enum rc rc = step_message_read(own, n, &LIMITS, &side->tables, &side->batch, &step, NULL);
    mem_free(own);
    return rc;
}

TEST(damaged_messages_are_refused_or_sound)
{
    struct side first = {0}, second = {0};
    char *bytes = mem_calloc(1, step_message_most_bytes(&LIMITS) + 64);
    uint32_t n_refused = 0, n_read = 0;
    side_open(&first);
    side_open(&second);
    fill(&first, true);
    size_t n = step_message_write(&first.batch, 1, bytes);
    for (size_t size = 0; size < n + 8; size++)
        if (size != n)
            CHECK_EQ(read_exactly(bytes, size, &second), RC_INVALID);
    static const int32_t values[] = {-1, 0, 1, 2, 3, 12, 13, 49, 50, 52, 58, 90, 1 << 30, INT32_MAX, INT32_MIN};
    for (size_t at = 0; at < n; at += 4)
        for (uint32_t v = 0; v < sizeof values / sizeof *values; v++) {
            int32_t before;
            memcpy(&before, bytes + at, 4);
            memcpy(bytes + at, &values[v], 4);
            if (read_exactly(bytes, n, &second))
                n_refused++;
            else if (n_read++, !is_sound(&second))
                CHECK_FAIL("the value %d at byte %zu was taken", values[v], at);
            page_tables_settle(&second.tables);
            memcpy(bytes + at, &before, 4);
        }
    CHECK(n_refused > 300 && n_read > 50);
    side_close(&first);
    side_close(&second);
    mem_free(bytes);
}
