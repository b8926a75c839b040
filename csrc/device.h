/* Devices whose memory the host cannot see: where results are added, and the buffers that cross. */
#pragma once

#include "ggml-backend.h"
#include "twofold.h"

/* Host memory for copies: pinned where the device offers it. What it held is lost when it grows. */
typedef struct tf_pinned {
    ggml_backend_buffer_t buffer;
    size_t capacity;
} tf_pinned;

/* Room for `bytes`; dev may be NULL. NULL: out of memory. */
void *tf_pinned_reserve(tf_pinned *p, ggml_backend_dev_t dev, size_t bytes);
void tf_pinned_free(tf_pinned *p);

enum { TF_ARENA_NODES = 16 };

/* A backend instance of our own on the device, beside the scheduler's, with room for one small graph at a time. */
typedef struct tf_lane {
    ggml_backend_t backend;
    void *arena; /* of the graph's descriptions */
    struct ggml_context *ctx;
    ggml_backend_buffer_t memory; /* of its tensors */
    size_t used;
    bool busy; /* work was started that nobody has waited for */
} tf_lane;

/* false: the device has no backend, or there is no memory. */
bool tf_lane_open(tf_lane *lane, ggml_backend_dev_t dev);
void tf_lane_close(tf_lane *lane);
/* Bytes of memory for tensors; what it held is lost if it was less. false: the device has no room. */
bool tf_lane_reserve(tf_lane *lane, size_t bytes);
/* Waits, forgets the lane's tensors and begins anew. */
struct ggml_context *tf_lane_begin(tf_lane *lane);
/* Puts t into the lane's memory after what is there. false: no room. */
bool tf_lane_place(tf_lane *lane, struct ggml_tensor *t);
/* A tensor of this shape over memory that another one has. NULL: the device refuses. */
struct ggml_tensor *tf_lane_alias(tf_lane *lane, const struct ggml_tensor *of, int64_t ne0, int64_t ne1);
/* Starts computing `result`; all tensors it is made of have memory or are views. */
tf_status tf_lane_start(tf_lane *lane, struct ggml_tensor *result);
void tf_lane_wait(tf_lane *lane);

typedef struct tf_device {
    struct tf_device *next;
    ggml_backend_dev_t dev;
    tf_lane adder;
    bool adds; /* results are added on the device; otherwise they are fetched, added here and stored */
    bool stage_tried;
    struct tf_stage *stage; /* NULL: prompts are not staged there (stage.h) */
} tf_device;

/* The device of a tensor in memory that the host cannot see; NULL for any other, and for memory of no device. */
ggml_backend_dev_t tf_tensor_device(const struct ggml_tensor *t);
/* The list's entry for dev, made if there is none yet; NULL: out of memory. */
tf_device *tf_device_get(tf_device **list, ggml_backend_dev_t dev);
void tf_devices_free(tf_device *list);
/* Adds values, float32 as node has them, in host memory, to a contiguous node on the device. false: it cannot be done
 * there, and will not be tried again. */
bool tf_device_add(tf_device *d, const struct ggml_tensor *node, const float *values);
