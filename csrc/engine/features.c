#include "features.h"
#include "items.h"

#include "../base/mem.h"

#define PAGE_FEATURES 16u /* rows of a page of the pool */
#define NO_PAGE UINT32_MAX

struct entry {
    struct hash content;
    uint32_t first_page, n_pages;
    uint64_t used;          /* number of the last step that used it */
};

struct features {
    struct entry *entries;  /* [n_pages], of which n_entries are used, in any order */
    uint32_t *next;         /* [n_pages] next page of the same entry, or free page; NO_PAGE: the last one */
    uint32_t n_pages, n_entries, n_free, free;
    uint32_t max_rows, rows_left; /* of pieces in a step, and those that the step being built may still compute */
    uint64_t n_steps;
    struct batch *batch;    /* of the step being built */
    uint32_t n_feature_rows; /* of the batch */
    bool holds;             /* the step being built computes no item */
    struct features_counts counts;
};

static void free_all(struct features *f)
{
    for (uint32_t page = 0; page < f->n_pages; page++)
        f->next[page] = page + 1 < f->n_pages ? page + 1 : NO_PAGE;
    f->free = f->n_pages ? 0 : NO_PAGE;
    f->n_free = f->n_pages;
    f->n_entries = 0;
}

enum rc features_create(uint32_t n_features, uint32_t max_rows, struct features **result, struct err *err)
{
    struct features *f = mem_calloc(1, sizeof *f);
    *result = f;
    if (!f)
        return err_set(err, RC_MEMORY, "features: out of memory");
    f->n_pages = n_features / PAGE_FEATURES;
    f->max_rows = max_rows;
    f->entries = mem_calloc(f->n_pages, sizeof *f->entries);
    f->next = mem_calloc(f->n_pages, sizeof *f->next);
    if (!f->entries || !f->next)
        return err_set(err, RC_MEMORY, "features: out of memory for %u; lower encoder_cache_tokens", n_features);
    free_all(f);
    return RC_OK;
}

void features_destroy(struct features *f)
{
    if (!f)
        return;
    mem_free(f->entries);
    mem_free(f->next);
    mem_free(f);
}

void features_reset(struct features *f)
{
    if (f)
        free_all(f);
}

const struct features_counts *features_counts(const struct features *f)
{
    return &f->counts;
}

void features_release(struct features *f)
{
    f->holds = false;
}

void features_begin_step(struct features *f, struct batch *batch, bool holds)
{
    if (!f)
        return;
    f->n_steps++;
    f->holds = holds;
    f->batch = batch;
    f->rows_left = f->max_rows;
    f->n_feature_rows = batch->n_encodings = 0;
}

static struct entry *find(const struct features *f, const struct hash *content)
{
    for (uint32_t i = 0; i < f->n_entries; i++)
        if (hash_equal(&f->entries[i].content, content))
            return &f->entries[i];
    return NULL;
}

static void evict(struct features *f, struct entry *entry)
{
    uint32_t last = entry->first_page;
    while (f->next[last] != NO_PAGE)
        last = f->next[last];
    f->next[last] = f->free;
    f->free = entry->first_page;
    f->n_free += entry->n_pages;
    *entry = f->entries[--f->n_entries];
    f->counts.n_evictions++;
}

/* Frees pages until there are n, from the entries that this step does not use; false if it uses too many. */
static bool make_room(struct features *f, uint32_t n)
{
    while (f->n_free < n) {
        struct entry *oldest = NULL;
        for (uint32_t i = 0; i < f->n_entries; i++)
            if (f->entries[i].used != f->n_steps && (!oldest || f->entries[i].used < oldest->used))
                oldest = &f->entries[i];
        if (!oldest)
            return false;
        evict(f, oldest);
    }
    return true;
}

static struct entry *add(struct features *f, const struct hash *content, uint32_t n_pages)
{
    struct entry *entry = &f->entries[f->n_entries++];
    uint32_t last = f->free;
    *entry = (struct entry){*content, f->free, n_pages, f->n_steps};
    for (uint32_t i = 1; i < n_pages; i++)
        last = f->next[last];
    f->free = f->next[last];
    f->next[last] = NO_PAGE;
    f->n_free -= n_pages;
    return entry;
}

/* Lists the pool's rows of features first .. first + n of an entry. */
static void list_rows(const struct features *f, const struct entry *entry, uint32_t first, uint32_t n, int32_t *rows)
{
    uint32_t page = entry->first_page;
    for (uint32_t i = 0; i < first / PAGE_FEATURES; i++)
        page = f->next[page];
    for (uint32_t i = first; i < first + n; i++) {
        if (i > first && i % PAGE_FEATURES == 0)
            page = f->next[page];
        rows[i - first] = (int32_t)(page * PAGE_FEATURES + i % PAGE_FEATURES);
    }
}

/* Lets the step compute an item. The first item of a step may have more rows than a step should have. */
static bool encode(struct features *f, const struct prompt_item *item)
{
    uint32_t n_pages = (item->n_features + PAGE_FEATURES - 1) / PAGE_FEATURES;
    uint64_t n_rows = 0;
    for (uint32_t i = 0; i < item->n_pieces; i++)
        n_rows += item->pieces[i].n_rows;
    if (f->holds || (n_rows > f->rows_left && f->batch->n_encodings) || !make_room(f, n_pages))
        return false;
    f->rows_left -= n_rows < f->rows_left ? (uint32_t)n_rows : f->rows_left;
    f->batch->encodings[f->batch->n_encodings++] = (struct encoding){item, f->n_feature_rows};
    list_rows(f, add(f, &item->content, n_pages), 0, item->n_features, f->batch->feature_rows + f->n_feature_rows);
    f->n_feature_rows += item->n_features;
    f->counts.n_items++;
    f->counts.n_pieces += item->n_pieces;
    f->counts.n_rows += n_rows;
    return true;
}

uint32_t features_take(struct features *f, const struct sequence *q, uint32_t n)
{
    struct request *r = q->request;
    const struct request_spec *spec = &r->spec;
    for (uint32_t i = 0; f && i < spec->n_items; i++) {
        const struct prompt_item *item = &spec->items[i];
        if (item->first >= q->n_computed + n)
            break;
        if (item->first + item->n_tokens <= q->n_computed)
            continue;
        struct entry *entry = find(f, &item->content);
        bool is_first = i >= r->n_seen_items;
        if (!entry && !encode(f, item)) {
            n = item->first > q->n_computed ? item->first - q->n_computed : 0;
            break;
        }
        if (entry)
            entry->used = f->n_steps;
        f->counts.n_hits += entry && is_first;
        f->counts.n_again += !entry && !is_first;
        r->n_encoded_items += !entry && is_first;
        r->n_seen_items = is_first ? i + 1 : r->n_seen_items;
    }
    return f ? items_cut(q->request, q->n_computed, n) : n;
}

bool features_fill(const struct features *f, const struct sequence *q, uint32_t first, uint32_t n, int32_t *visual)
{
    const struct request *r = q->request;
    bool has_any = false;
    for (uint32_t i = 0; i < n; i++)
        visual[i] = -1;
    for (uint32_t i = 0; i < r->spec.n_items; i++) {
        const struct prompt_item *item = &r->spec.items[i];
        uint32_t begin = item->first > first ? item->first : first, end = item->first + item->n_tokens;
        end = end < first + n ? end : first + n;
        const struct entry *entry = begin < end ? find(f, &item->content) : NULL;
        for (uint32_t position = begin, n_run; entry && position < end; position += n_run) {
            int32_t feature = r->features[position];
            for (n_run = 1; feature >= 0 && position + n_run < end; n_run++)
                if (r->features[position + n_run] != feature + (int32_t)n_run)
                    break;
            if (feature >= 0)
                list_rows(f, entry, (uint32_t)feature, n_run, &visual[position - first]);
            has_any |= feature >= 0;
        }
    }
    return has_any;
}
