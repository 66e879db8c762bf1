#include "status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum rc err_set(struct err *err, enum rc rc, const char *format, ...)
{
    if (!err)
        return rc;
    memset(err, 0, sizeof *err);
    err->rc = rc;
    va_list args;
    va_start(args, format);
    vsnprintf(err->message, sizeof err->message, format, args);
    va_end(args);
    return rc;
}

void err_name(struct err *err, const char *what, const char *tensor)
{
    if (!err)
        return;
    if (what)
        snprintf(err->what, sizeof err->what, "%s", what);
    if (tensor)
        snprintf(err->tensor, sizeof err->tensor, "%s", tensor);
}
