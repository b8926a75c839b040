/* ggml's own quantizers, with their arguments checked: ggml aborts where this returns an error. */
#include "ggml.h"
#include "twofold.h"

const char *tf_ggml_version(void) { return ggml_version(); }
const char *tf_ggml_version_built(void) { return TF_GGML_VERSION; }
const void *tf_ggml_address(void) { return (const void *)&ggml_version; }

int32_t tf_type_count(void) { return GGML_TYPE_COUNT; }

/* Types that ggml_quantize_chunk takes; it aborts on any other. */
static bool quantizable(enum ggml_type type) {
    switch (type) {
        case GGML_TYPE_F32:
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16: return true;
        case GGML_TYPE_Q8_1:
        case GGML_TYPE_Q8_K: return false; /* for activations only */
        default: {
            const struct ggml_type_traits *traits = ggml_get_type_traits(type);
            return traits->is_quantized && traits->to_float != NULL;
        }
    }
}

tf_status tf_type_get(int32_t type, tf_type *out) {
    if (type < 0 || type >= GGML_TYPE_COUNT || ggml_get_type_traits(type)->blck_size == 0) {
        return tf_fail(TF_ERR_ARGUMENT, "ggml %s has no type %d", ggml_version(), type);
    }
    const struct ggml_type_traits *traits = ggml_get_type_traits(type);
    *out = (tf_type){traits->type_name, traits->blck_size, (int64_t)traits->type_size, quantizable(type),
                     traits->is_quantized && ggml_quantize_requires_imatrix(type)};
    return TF_OK;
}

tf_status tf_dequantize(int32_t type, const void *src, size_t src_bytes, float *dst, int64_t n) {
    tf_type info = {0};
    tf_status status = tf_type_get(type, &info);
    if (status != TF_OK) {
        return status;
    }
    if (n < 0 || n % info.block != 0 || src_bytes != (size_t)(n / info.block * info.block_bytes)) {
        return tf_fail(TF_ERR_ARGUMENT, "%zu bytes do not hold %lld weights of type %s", src_bytes, (long long)n,
                       info.name);
    }
    if (type == GGML_TYPE_F32) {
        for (int64_t i = 0; i < n; i++) {
            dst[i] = ((const float *)src)[i];
        }
        return TF_OK;
    }
    const ggml_to_float_t to_float = ggml_get_type_traits(type)->to_float;
    if (to_float == NULL) {
        return tf_fail(TF_ERR_UNSUPPORTED, "ggml %s cannot read type %s as floats", ggml_version(), info.name);
    }
    to_float(src, dst, n);
    return TF_OK;
}

tf_status tf_quantize(int32_t type, const float *src, int64_t rows, int64_t width, const float *imatrix, void *dst,
                      size_t dst_bytes) {
    tf_type info = {0};
    tf_status status = tf_type_get(type, &info);
    if (status != TF_OK) {
        return status;
    }
    if (!info.quantizable) {
        return tf_fail(TF_ERR_UNSUPPORTED, "ggml %s has no quantizer for type %s", ggml_version(), info.name);
    }
    if (rows < 1 || width < 1 || width % info.block != 0) {
        return tf_fail(TF_ERR_ARGUMENT, "type %s holds widths that %lld divides, not %lld", info.name,
                       (long long)info.block, (long long)width);
    }
    if (info.needs_imatrix && imatrix == NULL) {
        return tf_fail(TF_ERR_ARGUMENT, "type %s needs an importance matrix", info.name);
    }
    if (dst_bytes != (size_t)(rows * (width / info.block) * info.block_bytes)) {
        return tf_fail(TF_ERR_ARGUMENT, "%zu bytes do not hold %lld x %lld weights of type %s", dst_bytes,
                       (long long)rows, (long long)width, info.name);
    }
    ggml_quantize_chunk(type, src, dst, 0, rows, width, imatrix);
    return TF_OK;
}
