#include "step_message.h"

#include <string.h>

#define MAGIC 0x70657473u /* "step" */
#define VERSION 1u

enum flag { HAS_TYPES = 1, SHARES_NEW_KEYS = 2 };

/* The arrays follow in the order of `sections`. */
struct header {
    uint32_t magic, version;
    uint64_t step;
    uint32_t flags, n_rows, n_seqs, n_logits_rows, n_state_rows, n_copies, n_runs, n_entries;
};

enum section { IDS, POSITIONS, TYPES, ROW_SEQ, FIRST_ROWS, WANTED, COPIES, RUNS, ENTRIES, SECTIONS };

/* The number of int32 values of each section. */
static void count_values(const struct header *h, uint64_t counts[SECTIONS])
{
    const uint64_t found[SECTIONS] = {
        [IDS] = h->n_rows, [POSITIONS] = h->n_rows, [TYPES] = h->flags & HAS_TYPES ? h->n_rows : 0, [ROW_SEQ] = h->n_rows,
        [FIRST_ROWS] = (uint64_t)h->n_seqs + 1, [WANTED] = (uint64_t)h->n_logits_rows + h->n_state_rows,
        [COPIES] = 2 * (uint64_t)h->n_copies, [RUNS] = 2 * (uint64_t)h->n_runs, [ENTRIES] = h->n_entries};
    memcpy(counts, found, sizeof found);
}

size_t step_message_most_bytes(const struct step_limits *l)
{
    size_t n_table_rows = (size_t)l->n_tables * (l->max_seqs + 1);
    return sizeof(struct header) + sizeof(int32_t) * (5 * (size_t)l->max_rows + l->max_seqs + 1 + 2 * (size_t)l->max_copies +
                                                      n_table_rows * (2 + (size_t)l->stride));
}

size_t step_message_write(const struct batch *b, uint64_t step, void *bytes)
{
    const struct page_tables *t = b->tables;
    struct header h = {MAGIC, VERSION, step, (b->has_types ? HAS_TYPES : 0) | (b->shares_new_keys ? SHARES_NEW_KEYS : 0),
                       b->n_rows, b->n_seqs, b->n_logits_rows, b->n_state_rows, b->n_copies, t->n_runs, 0};
    const void *arrays[SECTIONS] = {b->token_ids, b->positions, b->token_types, b->row_seq, b->seq_first_row, b->logits_rows,
                                    b->copies, t->runs, NULL};
    uint64_t counts[SECTIONS];
    for (uint32_t i = 0; i < t->n_runs; i++)
        h.n_entries += t->runs[i].count;
    count_values(&h, counts);
    char *at = (char *)bytes + sizeof h;
    memcpy(bytes, &h, sizeof h);
    for (uint32_t i = 0; i < ENTRIES; i++) {
        size_t size = counts[i] * sizeof(int32_t);
        if (size)
            memcpy(at, arrays[i], size);
        at += size;
    }
    for (uint32_t i = 0; i < t->n_runs; i++) {
        size_t size = t->runs[i].count * sizeof(int32_t);
        memcpy(at, t->pages + t->runs[i].first, size);
        at += size;
    }
    return (size_t)(at - (char *)bytes);
}

/* ---- reading ----------------------------------------------------------------------------------------------------------- */

static enum rc refuse(struct err *err, const char *what, uint64_t wanted, int64_t have)
{
    return err_set(err, RC_INVALID, "step message: wanted %s %llu, have %lld", what, (unsigned long long)wanted,
                   (long long)have);
}

/* Whether all values are in [least, end). */
static enum rc check_values(const int32_t *values, uint64_t n, int32_t least, uint64_t end, const char *what, struct err *err)
{
    for (uint64_t i = 0; i < n; i++)
        if (values[i] < least || (uint64_t)values[i] >= end)
            return refuse(err, what, end, values[i]);
    return RC_OK;
}

static enum rc check_header(const struct header *h, size_t n_bytes, const struct step_limits *l, struct err *err)
{
    uint64_t counts[SECTIONS], n_values = 0, n_table_rows = (uint64_t)l->n_tables * (l->max_seqs + 1);
    if (h->magic != MAGIC || h->version != VERSION)
        return refuse(err, "version", VERSION, h->version);
    if (h->flags & ~(uint32_t)(HAS_TYPES | SHARES_NEW_KEYS) || (h->flags & HAS_TYPES && !l->n_token_types))
        return refuse(err, "flags of the model, at most", l->n_token_types ? 3 : 2, h->flags);
    if (!h->n_rows || h->n_rows > l->max_rows)
        return refuse(err, "rows, from 1 to", l->max_rows, h->n_rows);
    if (!h->n_seqs || h->n_seqs > l->max_seqs || h->n_seqs > h->n_rows)
        return refuse(err, "sequences, from 1 to", l->max_seqs, h->n_seqs);
    if ((uint64_t)h->n_logits_rows + h->n_state_rows > l->max_rows)
        return refuse(err, "wanted rows, at most", l->max_rows, (int64_t)((uint64_t)h->n_logits_rows + h->n_state_rows));
    if (h->n_copies > l->max_copies)
        return refuse(err, "copies, at most", l->max_copies, h->n_copies);
    if (h->n_runs > n_table_rows || h->n_entries > n_table_rows * l->stride)
        return refuse(err, "runs of page tables, at most", n_table_rows, h->n_runs);
    count_values(h, counts);
    for (uint32_t i = 0; i < SECTIONS; i++)
        n_values += counts[i];
    uint64_t wanted = sizeof *h + n_values * sizeof(int32_t);
    return wanted == n_bytes ? RC_OK : refuse(err, "bytes", wanted, (int64_t)n_bytes);
}

/* Rows of a sequence lie together, and all have its slot. */
static enum rc check_rows(const struct header *h, const int32_t *row_seq, const int32_t *first_rows, struct err *err)
{
    if (first_rows[0] != 0 || first_rows[h->n_seqs] != (int32_t)h->n_rows)
        return refuse(err, "sequences whose rows end at", h->n_rows, first_rows[h->n_seqs]);
    for (uint32_t s = 0; s < h->n_seqs; s++) {
        if (first_rows[s + 1] <= first_rows[s] || first_rows[s + 1] > (int32_t)h->n_rows)
            return refuse(err, "sequences of at least one row, behind row", (uint64_t)(uint32_t)first_rows[s],
                          first_rows[s + 1]);
        for (int32_t row = first_rows[s] + 1; row < first_rows[s + 1]; row++)
            if (row_seq[row] != row_seq[first_rows[s]])
                return refuse(err, "rows of the slot", (uint64_t)(uint32_t)row_seq[first_rows[s]], row_seq[row]);
    }
    return RC_OK;
}

static enum rc check_runs(const struct header *h, const int32_t *runs, const struct step_limits *l, struct err *err)
{
    uint64_t n_all = (uint64_t)l->n_tables * (l->max_seqs + 1) * l->stride, n_entries = 0;
    for (uint32_t i = 0; i < h->n_runs; i++) {
        uint64_t first = (uint32_t)runs[2 * i], count = (uint32_t)runs[2 * i + 1];
        if (!count || first + count > n_all || first / l->stride != (first + count - 1) / l->stride)
            return refuse(err, "a run in one row of page tables, of entries below", n_all, (int64_t)(first + count));
        n_entries += count;
    }
    return n_entries == h->n_entries ? RC_OK : refuse(err, "entries of runs", n_entries, h->n_entries);
}

static enum rc check_sections(const struct header *h, const int32_t *const s[SECTIONS], const struct step_limits *l,
                              struct err *err)
{
    enum rc rc = check_values(s[IDS], h->n_rows, 0, l->vocab_size, "token ids from 0 on, below", err);
    if (!rc)
        rc = check_values(s[POSITIONS], h->n_rows, 0, l->max_model_len, "positions below", err);
    if (!rc && h->flags & HAS_TYPES)
        rc = check_values(s[TYPES], h->n_rows, 0, l->n_token_types, "token types below", err);
    if (!rc)
        rc = check_values(s[ROW_SEQ], h->n_rows, 0, l->max_seqs, "slots below", err);
    if (!rc)
        rc = check_rows(h, s[ROW_SEQ], s[FIRST_ROWS], err);
    if (!rc)
        rc = check_values(s[WANTED], (uint64_t)h->n_logits_rows + h->n_state_rows, 0, h->n_rows, "wanted rows below", err);
    if (!rc)
        rc = check_values(s[COPIES], 2 * (uint64_t)h->n_copies, 0, l->n_pages, "copied pages below", err);
    if (!rc)
        rc = check_runs(h, s[RUNS], l, err);
    if (!rc)
        rc = check_values(s[ENTRIES], h->n_entries, 0, l->n_pages, "pages below", err);
    return rc;
}

static void take_tables(struct page_tables *t, const int32_t *runs, const int32_t *entries, uint32_t n_runs)
{
    for (uint32_t i = 0; i < n_runs; i++) {
        uint32_t first = (uint32_t)runs[2 * i], count = (uint32_t)runs[2 * i + 1], row = first / t->stride;
        memcpy(t->pages + first, entries, count * sizeof *entries);
        entries += count;
        page_tables_note(t, row / (t->max_seqs + 1), row % (t->max_seqs + 1), first % t->stride, first % t->stride + count);
    }
}

enum rc step_message_read(const void *bytes, size_t n_bytes, const struct step_limits *limits, struct page_tables *tables,
                          struct batch *b, uint64_t *step, struct err *err)
{
    struct header h;
    uint64_t counts[SECTIONS];
    const int32_t *sections[SECTIONS], *at = (const int32_t *)((const char *)bytes + sizeof h);
    if (n_bytes < sizeof h)
        return refuse(err, "bytes, at least", sizeof h, (int64_t)n_bytes);
    memcpy(&h, bytes, sizeof h);
    enum rc rc = check_header(&h, n_bytes, limits, err);
    if (rc)
        return rc;
    count_values(&h, counts);
    for (uint32_t i = 0; i < SECTIONS; at += counts[i++])
        sections[i] = at;
    rc = check_sections(&h, sections, limits, err);
    if (rc)
        return rc;
    *step = h.step;
    b->slot = (uint32_t)(h.step % 2);
    b->n_rows = h.n_rows;
    b->n_seqs = h.n_seqs;
    b->n_logits_rows = h.n_logits_rows;
    b->n_state_rows = h.n_state_rows;
    b->n_copies = h.n_copies;
    b->has_types = h.flags & HAS_TYPES;
    b->shares_new_keys = h.flags & SHARES_NEW_KEYS;
    b->n_tasks = 0;
    int32_t *arrays[] = {b->token_ids, b->positions, b->token_types, b->row_seq, b->seq_first_row, b->logits_rows,
                         (int32_t *)b->copies};
    for (uint32_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        if (counts[i])
            memcpy(arrays[i], sections[i], counts[i] * sizeof(int32_t));
    take_tables(tables, sections[RUNS], sections[ENTRIES], h.n_runs);
    return RC_OK;
}
