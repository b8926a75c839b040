/* Front end 1: the scheduler's eval callback (ggml-backend.h, ggml_backend_sched_eval_callback).
 *
 * Asked about a node, true ends the run of nodes that are computed together, so the node's result can
 * be read and changed before anything uses it, and no later op is fused with it. In draft mode, and
 * for nodes that the engine computes in ggml's place, the answer is false: nothing is split off. Called with a result,
 * the answer must be true, or the scheduler drops the rest of the split. */
#include "engine.h"
#include "ggml-backend.h"

static bool callback(struct ggml_tensor *node, bool ask, void *engine) {
    return ask ? tf_engine_wants(engine, node) : tf_engine_apply(engine, node);
}

const void *tf_engine_callback(void) { return (const void *)&callback; }

bool tf_plugin_active(void) {
    ggml_backend_reg_t reg = ggml_backend_reg_by_name("twofold");
    return reg != NULL && ggml_backend_reg_get_proc_address(reg, "twofold_active") != NULL;
}
