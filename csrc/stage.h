/* Residuals of prompts, streamed to the device and multiplied there. */
#pragma once

#include "device.h"
#include "pool.h"
#include "registry.h"

typedef struct tf_stage tf_stage;

/* Staging memory on the device: `bytes` in all, kept until it is freed. NULL: the device cannot (no backend, no such
 * products, no room). */
tf_stage *tf_stage_new(ggml_backend_dev_t dev, const tf_registry *registry, size_t bytes);
void tf_stage_free(tf_stage *stage);
/* Whether the node's product can be staged: operands and result contiguous on the device, room for some rows. */
bool tf_stage_can(const tf_stage *stage, const tf_entry *entry, const struct ggml_tensor *node);
/* Adds R x to the node, computed on the device, and returns when that is done. uploaded: bytes of residual that
 * crossed are added to it. */
tf_status tf_stage_run(tf_stage *stage, tf_pool *pool, const tf_entry *entry, int32_t bits,
                       const struct ggml_tensor *node, uint64_t *uploaded);
/* Rows of planes as Q8_0 blocks, [rows][width / 32] of 34 bytes, and what is missing: weight = (block + half) / 128,
 * half: float16 [rows][width / 32] or NULL where the blocks are exact (4 and 6 bits). first: a multiple of 16. */
void tf_stage_convert(const tf_planes *planes, int64_t first, int64_t rows, void *blocks, uint16_t *half);
