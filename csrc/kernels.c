/* Which kernels were compiled in, which of them this CPU runs, and which is used. */
#include "kernels.h"

#include <stdlib.h>
#include <string.h>

/* Slowest first. */
static const tf_kernel *const compiled[] = {
    &tf_kernel_scalar,
#if defined(__x86_64__)
    &tf_kernel_avx2,
    &tf_kernel_avxvnni,
    &tf_kernel_avx512,
#elif defined(__aarch64__)
    &tf_kernel_neon,
#endif
};

static const tf_kernel *usable(int32_t index) {
    for (size_t i = 0; i < sizeof compiled / sizeof *compiled; i++) {
        if (compiled[i]->supported() && index-- == 0) {
            return compiled[i];
        }
    }
    return NULL;
}

int32_t tf_kernel_count(void) {
    int32_t n = 0;
    while (usable(n) != NULL) {
        n++;
    }
    return n;
}

const char *tf_kernel_name(int32_t index) {
    const tf_kernel *kernel = index >= 0 ? usable(index) : NULL;
    return kernel != NULL ? kernel->name : NULL;
}

const char *tf_kernel_default(void) {
    const char *forced = getenv("TWOFOLD_KERNEL");
    return forced != NULL && *forced != '\0' ? forced : tf_kernel_name(tf_kernel_count() - 1);
}

const tf_kernel *tf_kernel_find(const char *name) {
    const char *wanted = name != NULL ? name : tf_kernel_default();
    char known[256] = "";
    for (int32_t i = 0; usable(i) != NULL; i++) {
        if (strcmp(usable(i)->name, wanted) == 0) {
            return usable(i);
        }
        strncat(known, i > 0 ? ", " : "", sizeof known - strlen(known) - 1);
        strncat(known, usable(i)->name, sizeof known - strlen(known) - 1);
    }
    tf_fail(TF_ERR_ARGUMENT, "kernel %s (argument or TWOFOLD_KERNEL): this CPU has %s", wanted, known);
    return NULL;
}
