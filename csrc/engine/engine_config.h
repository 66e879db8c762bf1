/* engine_config.h: the engine's checked copy of its configuration. Constant after creation, so any thread may read it. */
#ifndef LLMPY_ENGINE_CONFIG_H
#define LLMPY_ENGINE_CONFIG_H

#include "sequence.h"

/* Checks config and copies it to *own, lists included, and fills *context: context->config points to *own, and
 * engine_config_free frees context->is_special. The error of RC_CONFIG names the option. */
enum rc engine_config_copy(const struct engine_config *config, struct engine_config *own, struct sequence_context *context,
                           struct err *err);
void engine_config_free(struct engine_config *own, struct sequence_context *context);

#endif
