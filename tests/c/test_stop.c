/* Stop strings in a stream of bytes against a plain search of the whole text. */
#include "../../csrc/engine/stop.h"
#include "check.h"

#define MAX_STRINGS 4u

static void random_bytes(char *bytes, uint32_t n, uint64_t *random)
{
    for (uint32_t i = 0; i < n; i++)
        bytes[i] = (char)("ab\xc3\0"[check_below(random, check_below(random, 2) ? 2 : 4)]);
}

struct strings {
    struct byte_string list[MAX_STRINGS];
    char bytes[MAX_STRINGS][8];
    uint32_t tables[MAX_STRINGS][8], *fallback[MAX_STRINGS], states[MAX_STRINGS];
    struct stop_set set;
};

static void random_strings(struct strings *s, uint64_t *random)
{
    memset(s, 0, sizeof *s);
    s->set = (struct stop_set){s->list, check_below(random, MAX_STRINGS + 1), s->fallback};
    for (uint32_t i = 0; i < s->set.n; i++) {
        s->fallback[i] = s->tables[i];
        s->list[i] = (struct byte_string){s->bytes[i], 1 + check_below(random, 8)};
        random_bytes(s->bytes[i], s->list[i].n, random);
    }
    stop_set_prepare(&s->set);
}

/* The first of the longest strings that end right behind the text's first `end` bytes. */
static bool plain_ends(const struct strings *s, const char *text, uint32_t end, uint32_t *which)
{
    uint32_t longest = 0;
    for (uint32_t i = 0; i < s->set.n; i++)
        if (s->list[i].n <= end && s->list[i].n > longest && !memcmp(text + end - s->list[i].n, s->list[i].bytes, s->list[i].n)) {
            longest = s->list[i].n;
            *which = i;
        }
    return longest > 0;
}

TEST(random_streams)
{
    uint64_t random = 3;
    uint32_t n_found = 0;
    struct strings s;
    char text[64];
    for (uint32_t round = 0; round < 20000; round++) {
        uint32_t n = 0, n_ignored = check_below(&random, 3) ? 0 : check_below(&random, 20);
        bool found = false;
        random_strings(&s, &random);
        while (n < 50 && !found) {
            uint32_t n_new = check_below(&random, 5), have = 0, wanted = 0;
            bool counts = n >= n_ignored, is_wanted = false;
            random_bytes(text + n, n_new, &random);
            found = stop_set_feed(&s.set, s.states, text + n, n_new, counts, &have);
            for (uint32_t end = n + 1; end <= n + n_new && counts && !is_wanted; end++)
                is_wanted = plain_ends(&s, text, end, &wanted);
            CHECK_EQ(found, is_wanted);
            CHECK_EQ(have, wanted);
            n += n_new;
        }
        n_found += found;
    }
    CHECK(n_found > 5000 && n_found < 19000);
}

TEST(the_first_to_end_then_the_longest)
{
    struct strings s = {.list = {{"abcd", 4}, {"bc", 2}, {"abc", 3}, {"abc", 3}}, .set = {s.list, 4, s.fallback}};
    uint32_t which;
    for (uint32_t i = 0; i < 4; i++)
        s.fallback[i] = s.tables[i];
    stop_set_prepare(&s.set);
    CHECK(!stop_set_feed(&s.set, s.states, "xa", 2, true, &which));
    CHECK(stop_set_feed(&s.set, s.states, "bcd", 3, true, &which));
    CHECK_EQ(which, 2);
}
