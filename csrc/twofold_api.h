/* The whole C interface of twofold. The compiler and cffi read this same file, so it holds plain
 * declarations only: no includes, no conditionals. C code includes it through twofold.h.
 *
 * Shapes are written [slowest][fastest]. GGUF and ggml list dimensions fastest first (ne[0] is the
 * width, the input dimension); numpy lists them slowest first. Everything below says "rows" for the
 * output dimension and "width" for the input dimension.
 *
 * Every function that returns tf_status leaves a message for tf_error() when it is not TF_OK. */

enum { TF_ABI = 7 };

typedef enum tf_status {
    TF_OK = 0,
    TF_ERR_ARGUMENT,    /* a value outside what is allowed */
    TF_ERR_IO,          /* the file cannot be opened, read or mapped */
    TF_ERR_FORMAT,      /* not GGUF, truncated, or not a residual */
    TF_ERR_VERSION,     /* a residual format version this library does not read */
    TF_ERR_MEMORY,      /* out of memory */
    TF_ERR_MISSING,     /* no such key or tensor */
    TF_ERR_UNSUPPORTED, /* a type or graph shape that cannot be handled */
    TF_ERR_NONFINITE,   /* NaN or infinity among the weights */
    TF_ERR_NOT_APPLIED  /* a residual that no graph node asked for */
} tf_status;

int32_t tf_abi(void);
const char *tf_error(void); /* of the calling thread, never NULL */

/* ---- the ggml that is loaded ---------------------------------------------------------------- */

const char *tf_ggml_version(void);       /* of the library loaded now */
const char *tf_ggml_version_built(void); /* of the headers this was compiled with */
const void *tf_ggml_address(void);       /* of ggml_version(), to prove that one copy is loaded */

typedef struct tf_type {
    const char *name;
    int64_t block;       /* weights a block */
    int64_t block_bytes; /* bytes a block */
    bool quantizable;    /* can be written from float32 */
    bool needs_imatrix;  /* ggml quantizes it only with an importance matrix */
} tf_type;

int32_t tf_type_count(void);
tf_status tf_type_get(int32_t type, tf_type *out);

/* src: blocks of `type` holding n weights; dst: float32 [n]. */
tf_status tf_dequantize(int32_t type, const void *src, size_t src_bytes, float *dst, int64_t n);
/* src: float32 [rows][width]; imatrix: float32 [width] or NULL; dst: rows of `type`. */
tf_status tf_quantize(int32_t type, const float *src, int64_t rows, int64_t width, const float *imatrix, void *dst,
                      size_t dst_bytes);
/* TF_ERR_NONFINITE, naming the first bad index, unless all n values are finite. */
tf_status tf_check_finite(const float *values, int64_t n);

/* ---- GGUF metadata -------------------------------------------------------------------------- */

typedef struct tf_gguf tf_gguf;

typedef struct tf_tensor {
    const char *name;
    int32_t type;
    int64_t ne[4];   /* ggml order: ne[0] is the width */
    uint64_t offset; /* of the data, from where the file's data begins */
    uint64_t bytes;
} tf_tensor;

tf_status tf_gguf_open(const char *path, tf_gguf **out);
/* Keys and alignment of another file, or, with NULL, no keys and this alignment. */
tf_status tf_gguf_new(const tf_gguf *copy_keys_of, uint32_t alignment, tf_gguf **out);
void tf_gguf_free(tf_gguf *gguf);

int64_t tf_gguf_tensor_count(const tf_gguf *gguf);
tf_status tf_gguf_tensor(const tf_gguf *gguf, int64_t index, tf_tensor *out);
/* Where the data of a file begins: for a new one, after all it has now. */
uint64_t tf_gguf_data_offset(const tf_gguf *gguf);
/* Any integer or bool key. */
tf_status tf_gguf_int(const tf_gguf *gguf, const char *key, int64_t *out);
/* The string lives as long as gguf. */
tf_status tf_gguf_string(const tf_gguf *gguf, const char *key, const char **out);

tf_status tf_gguf_set_u32(tf_gguf *gguf, const char *key, uint32_t value);
tf_status tf_gguf_set_u64s(tf_gguf *gguf, const char *key, const uint64_t *values, size_t n);
tf_status tf_gguf_set_string(tf_gguf *gguf, const char *key, const char *value);
tf_status tf_gguf_set_strings(tf_gguf *gguf, const char *key, const char **values, size_t n);
tf_status tf_gguf_remove(tf_gguf *gguf, const char *key);
/* Appends a tensor without data; its offset follows the tensors already there. */
tf_status tf_gguf_add(tf_gguf *gguf, const char *name, int32_t type, int32_t n_dims, const int64_t *ne);
/* Header, keys and tensor list as they stand in a file: size, then bytes. */
size_t tf_gguf_meta_bytes(const tf_gguf *gguf);
tf_status tf_gguf_meta(const tf_gguf *gguf, void *out, size_t bytes);
uint32_t tf_gguf_alignment(const tf_gguf *gguf);

/* ---- residual codec (docs/format.md) -------------------------------------------------------- */

enum {
    TF_FORMAT_VERSION = 1,
    TF_PANEL_ROWS = 16, /* rows that share a panel */
    TF_WIDTH_MULTIPLE = 32
};

/* One residual matrix. Planes a reader does not need may be NULL. */
typedef struct tf_planes {
    int64_t rows, width;
    int32_t group;    /* weights along the width that share a scale */
    int32_t bits;     /* 4, 6 or 8: planes to read */
    uint8_t *plane4;  /* [panels][width * 8]  bits 4-7 of the codes */
    uint8_t *plane6;  /* [panels][width * 4]  bits 2-3 */
    uint8_t *plane8;  /* [panels][width * 4]  bits 0-1 */
    uint16_t *scales; /* [panels][groups][16] float16 */
} tf_planes;

/* Bytes of one plane (4, 6 or 8) or, with plane 0, of the scales. */
int64_t tf_plane_bytes(int64_t rows, int64_t width, int32_t group, int32_t plane);
/* residual: float32 [rows][width]; fills the planes that out->bits needs. */
tf_status tf_residual_encode(const float *residual, const tf_planes *out);
/* The scales that tf_residual_encode takes: float16 [rows][groups]. */
tf_status tf_residual_scales(const float *residual, int64_t rows, int64_t width, int32_t group, int32_t bits,
                             uint16_t *scales);
/* n columns of every row, rounded one by one; what a column loses is made up for in the later of them.
 * values: float32 [rows][stride], of which the first n columns are meant; they change as they are rounded.
 * factor: [n][factor_stride], the upper triangle of its first n columns (docs/algorithm.md, "Error feedback").
 * scales: [rows][stride] float16, of each value; codes: [rows][stride]; lost: [rows][n], error / factor's diagonal. */
tf_status tf_residual_round(float *values, int64_t rows, int64_t stride, int64_t n, const float *factor,
                            int64_t factor_stride, int32_t bits, const uint16_t *scales, uint8_t *codes, float *lost);
/* Codes [rows][width] and scales [rows][groups] put into the planes. */
tf_status tf_residual_pack(const uint8_t *codes, const uint16_t *scales, const tf_planes *out);
/* out: float32 [rows][width]. */
tf_status tf_residual_decode(const tf_planes *planes, float *out);

/* ---- kernels -------------------------------------------------------------------------------- */

int32_t tf_kernel_count(void); /* that this CPU can run; the last is the fastest */
const char *tf_kernel_name(int32_t index);
const char *tf_kernel_default(void); /* TWOFOLD_KERNEL if set, else the fastest */

/* Whether a base of this ggml type in host memory has a kernel of its own. */
bool tf_base_has_kernel(int32_t type);

/* A base matrix as ggml lays it out. */
typedef struct tf_base_data {
    int32_t type;
    int64_t rows, width;
    const void *data;
} tf_base_data;

/* out = (B + R) x; either may be NULL. x: float32 [n][width]; out: float32 [n][rows]; kernel: a name, or
 * NULL for the default. For tests and benchmarks: the base is rearranged on every call. */
tf_status tf_matmul(const tf_planes *residual, const tf_base_data *base, const char *kernel, int32_t threads,
                    const float *x, int64_t n, float *out);

/* ---- timing (scripts/bench_kernels.py) ------------------------------------------------------ */

/* repeats products out = (B + R) x, with `count` matrices of one shape taking turns; residuals or bases may be NULL.
 * seconds: [repeats], without rearranging the base. */
tf_status tf_bench_matmul(const tf_planes *residuals, const tf_base_data *bases, int32_t count, const char *kernel,
                          int32_t threads, const float *x, int64_t n, float *out, int32_t repeats, double *seconds);
/* Reads all bytes, `repeats` times; seconds: [repeats]. */
tf_status tf_bench_read(const void *data, size_t bytes, int32_t threads, int32_t repeats, double *seconds);
/* Best rate of the kernel's multiply-add instruction on registers, two operations a multiply-add. */
tf_status tf_bench_peak(const char *kernel, int32_t threads, int64_t rounds, double *operations_a_second);

/* ---- the residual file ---------------------------------------------------------------------- */

typedef struct tf_residual tf_residual;

typedef struct tf_residual_tensor {
    const char *name;
    int64_t rows, width, experts;
    int32_t base_type;    /* ggml type of the base tensor it belongs to */
    uint64_t fingerprint; /* tf_fingerprint() of that tensor */
    tf_planes planes;     /* of expert 0; bits is what the file holds */
} tf_residual_tensor;

tf_status tf_residual_open(const char *path, tf_residual **out);
/* The same from memory that the caller keeps alive. */
tf_status tf_residual_from_memory(const void *data, size_t bytes, const char *label, tf_residual **out);
void tf_residual_free(tf_residual *residual);
int32_t tf_residual_bits(const tf_residual *residual);
int32_t tf_residual_group(const tf_residual *residual);
int64_t tf_residual_count(const tf_residual *residual);
tf_status tf_residual_get(const tf_residual *residual, int64_t index, tf_residual_tensor *out);
/* Brings the planes that `bits` reads into memory, and keeps them there if asked to. */
tf_status tf_residual_load(const tf_residual_tensor *tensor, int32_t bits, bool lock);
/* Expert `expert` of a tensor. */
tf_planes tf_residual_planes(const tf_residual_tensor *tensor, int64_t expert);
/* 64-bit FNV-1a over type, shape and up to 64 evenly spaced windows of 1 KiB. */
uint64_t tf_fingerprint(int32_t type, const int64_t *ne, const void *data, uint64_t bytes);

/* ---- the engine ----------------------------------------------------------------------------- */

typedef struct tf_engine tf_engine;

typedef enum tf_mode {
    TF_DRAFT = 0, /* base alone: every node is left as it is */
    TF_VERIFY = 1 /* base + residual */
} tf_mode;

typedef struct tf_counters {
    uint64_t nodes;             /* graph nodes a residual was added to */
    uint64_t residual_bytes;    /* bytes of planes and scales read */
    uint64_t base_bytes;        /* memory of base panels that were made */
    uint64_t to_device_bytes;   /* written to memory the host cannot see */
    uint64_t from_device_bytes; /* read from it */
    uint64_t device_adds;       /* nodes whose residual's product was added on their device */
    uint64_t early_nodes;       /* nodes of these whose product was begun before ggml computed the base's */
    uint64_t staged_nodes;      /* nodes whose residual was multiplied on their device */
    uint64_t staged_bytes;      /* the part of to_device_bytes that is residuals for these */
    double fetch_s, compute_s, store_s, stage_s;
} tf_counters;

/* What the engine does with a device that holds nodes. */
typedef struct tf_device_use {
    const char *name;      /* ggml's, as long as the device is there */
    bool adds;             /* products are added on the device; else results are fetched and stored */
    bool pinned;           /* it offers pinned host memory, which copies go through */
    bool async;            /* ggml says that uploads run beside other work */
    int64_t stage_columns; /* from how many columns on it multiplies residuals; 0: never */
    uint64_t stage_bytes;  /* of its memory, taken for that */
} tf_device_use;

enum { TF_STAGE_LEAST = 1 << 20, TF_STAGE_MOST = 1 << 30 };

/* Where something of a graph lies. */
typedef struct tf_seen {
    const char *name;   /* of a weight, a cache or a node, without what the scheduler adds to copies */
    const char *op;     /* ggml's name of the op; "NONE" for what the graph only reads */
    const char *device; /* ggml's name */
    bool host;          /* memory that the host can see */
    uint64_t bytes;
    bool residual; /* a residual belongs to it */
} tf_seen;

typedef void (*tf_survey_sink)(void *user, const tf_seen *seen);

/* residual must outlive the engine. threads: 1 or more. */
tf_status tf_engine_new(const tf_residual *residual, int32_t threads, tf_engine **out);
void tf_engine_free(tf_engine *engine);
tf_status tf_engine_set_bits(tf_engine *engine, int32_t bits); /* 0 (base alone), 4, 6, 8 */
/* Compute products of base weights in host memory with our own kernels, instead of ggml's; off at first. */
void tf_engine_claim(tf_engine *engine, bool on);
/* Before the first decode; without it, the engine computes nothing on devices: results are fetched and stored, and
 * nothing is begun early. From `columns` columns on (0: never), multiply residuals on the node's device instead of
 * here; `bytes` of memory are taken on each device, TF_STAGE_LEAST to TF_STAGE_MOST. */
tf_status tf_engine_stage(tf_engine *engine, int64_t columns, uint64_t bytes);
int32_t tf_engine_device_count(const tf_engine *engine);
tf_status tf_engine_device(const tf_engine *engine, int32_t index, tf_device_use *out);
/* In decodes from now on, shows the sink every node before it is computed, and what the graph only reads. Devices of
 * nodes with a residual are made ready. NULL ends it. */
void tf_engine_survey(tf_engine *engine, tf_survey_sink sink, void *user);
/* Around every llama_decode: begin says how it shall run, end reports what went wrong inside. */
void tf_engine_begin(tf_engine *engine, tf_mode mode);
tf_status tf_engine_end(tf_engine *engine);
tf_counters tf_engine_counters(const tf_engine *engine);
/* To put into llama_context_params.cb_eval, with the engine as cb_eval_user_data. */
const void *tf_engine_callback(void);
/* Whether libggml-twofold.so is at work in this process: with both, the residual would be added twice. */
bool tf_plugin_active(void);

/* ---- sampling ------------------------------------------------------------------------------- */

/* A struct llama_sampler * for the end of a chain: draws as "dist" does, but so that a draft's draw and the check's
 * mostly agree (race.c). init: address of llama_sampler_init. NULL if there is no memory. */
void *tf_race_sampler(void *init, uint32_t seed);

/* ---- calibration ---------------------------------------------------------------------------- */

typedef struct tf_collector tf_collector;

/* Inputs that one matrix, or one expert of it, is multiplied by in one graph. */
typedef struct tf_collected {
    const char *weight; /* name of the matrix */
    const char *input;  /* name of the graph node that made the inputs; q, k and v share one */
    int64_t expert, experts;
    int64_t n, width;
    const float *x; /* [n][width], valid during the call */
} tf_collected;

/* false stops the decode. */
typedef bool (*tf_collect_sink)(void *user, const tf_collected *seen);

tf_status tf_collector_new(tf_collect_sink sink, void *user, tf_collector **out);
void tf_collector_free(tf_collector *collector);
/* From now on: no inputs are shown, but noise is added to the products of this matrix, uniform and as large as
 * `amount` times their root mean square; the same noise after each call. An empty name ends it; a name that no
 * matrix has changes nothing. */
void tf_collector_disturb(tf_collector *collector, const char *weight, float amount);
/* After a llama_decode: what went wrong inside. */
tf_status tf_collector_end(tf_collector *collector);
/* To put into llama_context_params.cb_eval, with the collector as cb_eval_user_data. */
const void *tf_collector_callback(void);
