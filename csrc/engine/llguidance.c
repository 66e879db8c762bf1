#include "llguidance.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#define MAJOR 1ul
#define LEAST_MINOR 8ul

static enum rc check_version(const char *text, struct err *err)
{
    const char *at = strstr(text, "llguidance@");
    char *end = NULL;
    unsigned long major = at ? strtoul(at + strlen("llguidance@"), &end, 10) : 0, minor = 0;
    if (end && *end == '.')
        minor = strtoul(end + 1, NULL, 10);
    if (major == MAJOR && minor >= LEAST_MINOR)
        return RC_OK;
    return err_set(err, RC_UNSUPPORTED,
                   "structured_outputs: " LLG_WANTED ", have %.100s; pip install 'llmpy[structured]'", text);
}

enum rc llguidance_open(const char *path, struct llguidance *library, struct err *err)
{
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle)
        return err_set(err, RC_UNSUPPORTED, "structured_outputs: llguidance's library cannot be loaded: %.400s", dlerror());
    const struct {
        const char *name;
        void *place;
    } symbols[] = {
        {"llg_get_version", &library->get_version},
        {"llg_new_tokenizer_v2", &library->new_tokenizer},
        {"llg_free_tokenizer", &library->free_tokenizer},
        {"llg_constraint_init_set_defaults", &library->set_defaults},
        {"llg_new_matcher", &library->new_matcher},
        {"llg_clone_matcher", &library->clone_matcher},
        {"llg_free_matcher", &library->free_matcher},
        {"llg_matcher_compute_mask_into", &library->compute_mask_into},
        {"llg_matcher_consume_token", &library->consume_token},
        {"llg_matcher_consume_tokens", &library->consume_tokens},
        {"llg_matcher_validate_tokens", &library->validate_tokens},
        {"llg_matcher_rollback", &library->rollback},
        {"llg_matcher_reset", &library->reset},
        {"llg_matcher_is_accepting", &library->is_accepting},
        {"llg_matcher_is_stopped", &library->is_stopped},
        {"llg_matcher_get_error", &library->get_error},
    };
    const char *missing = NULL;
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        void *symbol = dlsym(handle, symbols[i].name);
        memcpy(symbols[i].place, &symbol, sizeof symbol); /* a function's address */
        if (!symbol && !missing)
            missing = symbols[i].name;
    }
    if (!library->get_version)
        return err_set(err, RC_UNSUPPORTED, "structured_outputs: " LLG_WANTED ", have a library without %s",
                       missing);
    enum rc rc = check_version(library->get_version(), err);
    if (!rc && missing)
        rc = err_set(err, RC_UNSUPPORTED, "structured_outputs: llguidance %.100s lacks %s; wanted >=1.8,<2",
                     library->get_version(), missing);
    return rc ? rc : llguidance_try(library, err);
}
