/* request_check.h: validates a request before it is queued. A pure function of its arguments; any thread may call it. Texts of
 * errors: docs/use/api.md. */
#ifndef LLMPY_REQUEST_CHECK_H
#define LLMPY_REQUEST_CHECK_H

#include "engine.h"

/* RC_INVALID: err->what names the parameter. */
enum rc request_check_prompt(const struct engine_config *config, const struct request_spec *spec, struct err *err);
enum rc request_check(const struct engine_config *config, const struct request_spec *spec, struct err *err);

#endif
