#include "features.h"
#include "items.h"

#include "../base/mem.h"

#define PAGE_FEATURES 16u /* rows of a page of the pool */
#define NO_PAGE UINT32_MAX
#define LEAST_SPLIT_ROWS 2048u /* of an item of one piece that is computed in parts, one a step */
#define LEAST_EARLY_ROWS 64u   /* in front of a split item; fewer wait for it, because a step reads all weights for any rows */
#define YIELD_ROWS 256u        /* of a prompt with items in a step, while texts come: they take as long as a short text */
#define PART_ROWS 65536u       /* of a part, summed over its steps of the tower's plan: a layer of an image of 1024 x 1024 */

struct entry {
    struct hash content;
    uint32_t first_page, n_pages;
    uint64_t used;          /* number of the last step that used it */
    bool is_pending;        /* parts of its computation are left for later steps */
};

/* An item that is computed in parts. Its sequence keeps it in memory. */
struct split {
    const struct sequence *owner; /* NULL: there is none */
    const struct prompt_item *item;
    uint32_t next;          /* step of the tower's plan that the next part begins with */
};

struct features {
    struct entry *entries;  /* [n_pages], of which n_entries are used, in any order */
    uint32_t *next;         /* [n_pages] next page of the same entry, or free page; NO_PAGE: the last one */
    uint32_t n_pages, n_entries, n_free, free;
    uint32_t max_rows, rows_left; /* of pieces in a step, and those that the step being built may still compute */
    uint64_t n_steps;
    struct batch *batch;    /* of the step being built */
    uint32_t n_feature_rows; /* of the batch */
    bool holds, yields;     /* as features_begin_step gave them for the step being built */
    uint32_t n_tower_steps; /* 0: no item is split */
    struct split split;
    struct features_counts counts;
};

static void free_all(struct features *f)
{
    for (uint32_t page = 0; page < f->n_pages; page++)
        f->next[page] = page + 1 < f->n_pages ? page + 1 : NO_PAGE;
    f->free = f->n_pages ? 0 : NO_PAGE;
    f->n_free = f->n_pages;
    f->n_entries = 0;
    f->split = (struct split){0};
}

enum rc features_create(const struct runner *runner, struct features **result, struct err *err)
{
    uint32_t n_features = runner->n_features;
    struct features *f = mem_calloc(1, sizeof *f);
    *result = f;
    if (!f)
        return err_set(err, RC_MEMORY, "features: out of memory");
    f->n_pages = n_features / PAGE_FEATURES;
    f->max_rows = runner->max_encoder_rows;
    f->n_tower_steps = runner->n_tower_steps;
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

/* Lets the step compute the next part of the item that is split, and no other item. */
static void split_go_on(struct features *f)
{
    struct split *split = &f->split;
    uint32_t n = PART_ROWS / split->item->pieces[0].n_rows;
    f->batch->tower_first = split->next;
    split->next += n ? n : 1;
    split->next = split->next < f->n_tower_steps ? split->next : f->n_tower_steps;
    f->batch->tower_end = split->next;
    f->batch->encodings[0] = (struct encoding){split->item, 0};
    f->batch->n_encodings = 1;
    f->rows_left = 0;
    if (split->next == f->n_tower_steps) {
        find(f, &split->item->content)->is_pending = false;
        *split = (struct split){0};
    }
}

void features_begin_step(struct features *f, struct batch *batch, bool holds, bool yields)
{
    if (!f)
        return;
    f->n_steps++;
    f->holds = holds;
    f->yields = yields;
    f->batch = batch;
    f->rows_left = f->max_rows;
    f->n_feature_rows = batch->n_encodings = batch->tower_first = batch->tower_end = 0;
    if (f->split.owner)
        find(f, &f->split.item->content)->used = f->n_steps;
    if (f->split.owner && !holds)
        split_go_on(f);
}

void features_release(struct features *f)
{
    f->holds = false;
    if (f->split.owner)
        split_go_on(f);
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
    *entry = (struct entry){*content, f->free, n_pages, f->n_steps, false};
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

void features_forget(struct features *f, const struct sequence *q)
{
    if (!f || f->split.owner != q)
        return;
    evict(f, find(f, &f->split.item->content));
    f->split = (struct split){0};
}

/* Lets the step compute an item, or the first part of one; NULL: it cannot. The first item of a step may have more rows than a
 * step should have. */
static struct entry *encode(struct features *f, const struct sequence *q, const struct prompt_item *item)
{
    uint32_t n_pages = (item->n_features + PAGE_FEATURES - 1) / PAGE_FEATURES;
    uint64_t n_rows = 0;
    for (uint32_t i = 0; i < item->n_pieces; i++)
        n_rows += item->pieces[i].n_rows;
    bool is_split = f->n_tower_steps && item->n_pieces == 1 && n_rows >= LEAST_SPLIT_ROWS;
    bool is_full = f->batch->n_encodings && (is_split || n_rows > f->rows_left);
    if (f->holds || is_full || !make_room(f, n_pages))
        return NULL;
    f->rows_left -= n_rows < f->rows_left ? (uint32_t)n_rows : f->rows_left;
    f->batch->encodings[f->batch->n_encodings++] = (struct encoding){item, f->n_feature_rows};
    struct entry *entry = add(f, &item->content, n_pages);
    list_rows(f, entry, 0, item->n_features, f->batch->feature_rows + f->n_feature_rows);
    f->n_feature_rows += item->n_features;
    f->counts.n_items++;
    f->counts.n_pieces += item->n_pieces;
    f->counts.n_rows += n_rows;
    if (is_split) {
        f->split = (struct split){q, item, 0};
        entry->is_pending = true;
        split_go_on(f);
    }
    return entry;
}

/* How many of n rows that can be computed the step computes: not all if texts would wait for them. Spans stay whole. */
static uint32_t yield_rows(const struct features *f, const struct sequence *q, uint32_t n)
{
    if (!q->request->spec.n_items || n <= 1)
        return n;
    if (f->holds)
        return 0;
    uint32_t few = f->yields && n > YIELD_ROWS ? items_cut(q->request, q->n_computed, YIELD_ROWS) : n;
    return few ? few : n;
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
        struct entry *found = find(f, &item->content), *entry = found ? found : encode(f, q, item);
        bool is_first = i >= r->n_seen_items;
        if (entry) {
            entry->used = f->n_steps;
            f->counts.n_hits += found && is_first;
            f->counts.n_again += !found && !is_first;
            r->n_encoded_items += !found && is_first;
            r->n_seen_items = is_first ? i + 1 : r->n_seen_items;
        }
        if (!entry || entry->is_pending) {
            n = item->first > q->n_computed ? item->first - q->n_computed : 0;
            n = entry && n < LEAST_EARLY_ROWS ? 0 : n;
            break;
        }
    }
    return f ? yield_rows(f, q, items_cut(q->request, q->n_computed, n)) : n;
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
