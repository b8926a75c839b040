/* Errors: one message a thread. */
#include <stdarg.h>
#include <stdio.h>

#include "twofold.h"

static _Thread_local char message[1024] = "";

tf_status tf_fail(tf_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return status;
}

const char *tf_error(void) { return message; }

int32_t tf_abi(void) { return TF_ABI; }
