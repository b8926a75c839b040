/* What a front end (eval_callback.c) asks of the engine. */
#pragma once

#include "ggml.h"
#include "twofold.h"

/* Before the node is computed: claims it where the engine can do it all. Otherwise, whether the node's
 * result is wanted, for a residual belongs to it in the mode the engine is in. */
bool tf_engine_wants(tf_engine *engine, struct ggml_tensor *node);
/* Adds the residual's product to the node's result, which has been computed. false: stop the graph,
 * tf_engine_end() says why. */
bool tf_engine_apply(tf_engine *engine, struct ggml_tensor *node);
