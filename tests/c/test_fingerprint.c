/* The fingerprint of a base tensor: every part of its description counts, and the bytes that it samples. */
#include "test.h"

static const int64_t shape[4] = {64, 32, 1, 1};

/* A buffer of exactly this size, read as a whole up to 64 KiB, in windows beyond. */
static void check_size(size_t bytes) {
    uint8_t *data = test_alloc(bytes);
    for (size_t i = 0; i < bytes; i++) {
        data[i] = (uint8_t)(i * 7);
    }
    const uint64_t print = tf_fingerprint(2, shape, data, bytes);
    CHECK(print == tf_fingerprint(2, shape, data, bytes));
    /* The last window may end up to 62 bytes before the end. */
    const size_t sampled[] = {0, bytes / 2 < 512 ? bytes / 2 : 512, bytes > 512 ? bytes - 512 : 0,
                              bytes > 64 << 10 ? bytes - 64 : bytes - 1};
    for (int i = 0; i < 4; i++) {
        data[sampled[i]] ^= 1;
        CHECK(tf_fingerprint(2, shape, data, bytes) != print);
        data[sampled[i]] ^= 1;
    }
    for (int i = 0; i < 4; i++) {
        int64_t other[4] = {shape[0], shape[1], shape[2], shape[3]};
        other[i]++;
        CHECK(tf_fingerprint(2, other, data, bytes) != print);
    }
    CHECK(tf_fingerprint(3, shape, data, bytes) != print);
    free(data);
}

int main(void) {
    static const size_t sizes[] = {1, 1023, 1024, 65535, 65536, 65537, 70000, 1 << 20};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        check_size(sizes[i]);
    }
    /* FNV-1a of the type and the shape alone: files that were written must stay readable. */
    uint64_t want = 0xcbf29ce484222325u;
    const int32_t type = 2;
    uint8_t bytes[sizeof type + sizeof shape];
    memcpy(bytes, &type, sizeof type);
    memcpy(bytes + sizeof type, shape, sizeof shape);
    for (size_t i = 0; i < sizeof bytes; i++) {
        want = (want ^ bytes[i]) * 0x100000001b3u;
    }
    CHECK(tf_fingerprint(type, shape, bytes, 0) == want);
    return 0;
}
