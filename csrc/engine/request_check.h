/* request_check.h: everything that can be wrong with a request, found before it is queued. A pure function of its arguments,
 * any thread. Texts: docs/use/api.md. */
#ifndef LLMPY_REQUEST_CHECK_H
#define LLMPY_REQUEST_CHECK_H

#include "engine.h"

/* RC_INVALID, with the parameter's name in err->what. */
enum rc request_check(const struct engine_config *config, const struct request_spec *spec, struct err *err);

#endif
