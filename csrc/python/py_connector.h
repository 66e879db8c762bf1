/* py_connector.h: connectors of the outer tier that are written in Python. The GIL is held in both functions. */
#ifndef LLMPY_PY_CONNECTOR_H
#define LLMPY_PY_CONNECTOR_H

#include "py.h"

#define PY_FINGERPRINT 16

/* tuple: (llmpy.kv.Connector, fingerprint, whether it outlives the engine, deadline in seconds). -1 with an exception set. */
int py_connector_make(PyObject *tuple, size_t page_bytes, struct connector *connector);
/* Call it once the engine has been made, or has not been made (is_used false): then the engine may have closed the
 * connector. */
void py_connector_release(struct connector *connector, bool is_used);

#endif
