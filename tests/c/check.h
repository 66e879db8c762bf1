/* check.h: the C tests' whole framework. A file test_<what>.c includes it once and writes TEST(name) { ... } blocks, which
 * register themselves; the main below runs all of them, or those named on the command line, and exits with 1 when a check
 * failed. A failed CHECK is printed and counted and the test goes on; a failed REQUIRE also leaves the test (so it stands in
 * functions that return void). tests/unit/test_c.py builds each file against the core under ASan and UBSan and runs it. */
#ifndef LLMPY_CHECK_H
#define LLMPY_CHECK_H

#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/base/status.h"

#define UNUSED __attribute__((unused)) /* of functions that not every test calls */

struct check_case {
    const char *name;
    void (*run)(void);
    struct check_case *next;
};

static struct check_case *check_first, **check_last = &check_first;
static int check_failures;

#define TEST(test)                                                                                                             \
    static void test(void);                                                                                                    \
    static struct check_case case_##test = {#test, test, NULL};                                                                \
    __attribute__((constructor)) static void register_##test(void)                                                             \
    {                                                                                                                          \
        *check_last = &case_##test;                                                                                            \
        check_last = &case_##test.next;                                                                                        \
    }                                                                                                                          \
    static void test(void)

#define CHECK_FAIL(...)                                                                                                        \
    do {                                                                                                                       \
        check_failures++;                                                                                                      \
        fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);                                                                        \
        fprintf(stderr, __VA_ARGS__);                                                                                          \
        fputc('\n', stderr);                                                                                                   \
    } while (0)

#define CHECK(condition)                                                                                                       \
    do {                                                                                                                       \
        if (!(condition))                                                                                                      \
            CHECK_FAIL("not true: %s", #condition);                                                                            \
    } while (0)

#define REQUIRE(condition)                                                                                                     \
    do {                                                                                                                       \
        if (!(condition)) {                                                                                                    \
            CHECK_FAIL("not true: %s", #condition);                                                                            \
            return;                                                                                                            \
        }                                                                                                                      \
    } while (0)

/* Integers. */
#define CHECK_EQ(have, wanted)                                                                                                 \
    do {                                                                                                                       \
        long long check_have = (long long)(have), check_wanted = (long long)(wanted);                                          \
        if (check_have != check_wanted)                                                                                        \
            CHECK_FAIL("%s: wanted %lld, have %lld", #have, check_wanted, check_have);                                         \
    } while (0)

#define CHECK_STR(have, wanted)                                                                                                \
    do {                                                                                                                       \
        const char *check_have = (have), *check_wanted = (wanted);                                                             \
        if (!check_have || strcmp(check_have, check_wanted) != 0)                                                              \
            CHECK_FAIL("%s: wanted \"%s\", have \"%s\"", #have, check_wanted, check_have ? check_have : "(null)");             \
    } while (0)

/* A text that must stand somewhere in another, as in an error's message. */
#define CHECK_CONTAINS(text, part)                                                                                             \
    do {                                                                                                                       \
        if (!strstr((text), (part)))                                                                                           \
            CHECK_FAIL("%s: wanted ...%s..., have %s", #text, (part), (text));                                                 \
    } while (0)

/* A call that returns enum rc and fills the struct err called err in the test. */
#define CHECK_OK(call)                                                                                                         \
    do {                                                                                                                       \
        if ((call) != RC_OK)                                                                                                   \
            CHECK_FAIL("%s: %s", #call, err.message);                                                                          \
    } while (0)

#define REQUIRE_OK(call)                                                                                                       \
    do {                                                                                                                       \
        if ((call) != RC_OK) {                                                                                                 \
            CHECK_FAIL("%s: %s", #call, err.message);                                                                          \
            return;                                                                                                            \
        }                                                                                                                      \
    } while (0)

/* Seeded random numbers (splitmix64): the same on every machine. */
UNUSED static uint64_t check_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* 0 .. n - 1; n > 0. */
UNUSED static uint32_t check_below(uint64_t *state, uint32_t n)
{
    return (uint32_t)((check_random(state) >> 32) * n >> 32);
}

int main(int argc, char **argv)
{
    int n_run = 0;
    for (struct check_case *test = check_first; test; test = test->next) {
        bool wanted = argc < 2;
        for (int i = 1; i < argc; i++)
            wanted = wanted || strcmp(argv[i], test->name) == 0;
        if (!wanted)
            continue;
        int before = check_failures;
        test->run();
        n_run++;
        printf("%s %s\n", check_failures == before ? "ok    " : "FAILED", test->name);
    }
    printf("%d tests, %d failed checks\n", n_run, check_failures);
    return check_failures || !n_run;
}

#endif
