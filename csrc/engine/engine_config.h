/* engine_config.h: an engine's own, checked copy of what its creator handed over. Constant afterwards, any thread. */
#ifndef LLMPY_ENGINE_CONFIG_H
#define LLMPY_ENGINE_CONFIG_H

#include "sequence.h"

/* Checks and copies; *own's lists and context->is_special belong to the copy, and context->config points to *own. RC_CONFIG
 * names the option. */
enum rc engine_config_copy(const struct engine_config *config, struct engine_config *own, struct sequence_context *context,
                           struct err *err);
void engine_config_free(struct engine_config *own, struct sequence_context *context);

#endif
