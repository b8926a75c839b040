/* Draws a token in a way that two draws from nearly equal probabilities mostly agree.
 *
 * Each token of weight w has its own noise e, exponential, and the smallest e / w wins: token i with probability w[i]
 * over the sum of all w. The noise depends on the seed, the number of the draw and the token alone. A draft's draw and
 * the check's have the same noise, so where the probabilities differ a little the winner rarely does; one random
 * number that runs through both cumulative distributions would be carried over a border by every token before it. */
#include <math.h>
#include <stdlib.h>

#include "llama.h"
#include "twofold.h"

typedef struct llama_sampler *(*sampler_init)(struct llama_sampler_i *interface, llama_sampler_context_t context);

typedef struct race {
    sampler_init init;
    uint64_t seed;
    uint64_t drawn;
} race;

/* The finalizer of SplitMix64 (Steele, Lea & Flood 2014). */
static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static const char *race_name(const struct llama_sampler *sampler) { return "race"; }

/* log(w / e) instead of e / w, and the largest instead of the smallest. */
static void race_apply(struct llama_sampler *sampler, llama_token_data_array *tokens) {
    race *state = sampler->ctx;
    const uint64_t key = mix(mix(state->seed + 0x9e3779b97f4a7c15u) + state->drawn++);
    double best = -INFINITY;
    tokens->selected = tokens->size ? 0 : -1;
    for (size_t i = 0; i < tokens->size; i++) {
        const uint64_t own = mix(key + 0x9e3779b97f4a7c15u * ((uint64_t)(uint32_t)tokens->data[i].id + 1));
        const double rest = ((double)(own >> 11) + 0.5) * 0x1p-53; /* in 0 .. 1; e = -log(1 - rest), at least rest */
        const double logit = (double)tokens->data[i].logit;
        int exponent; /* e is at least 2^(exponent - 1), so -log(e) at most (1 - exponent) log 2: spares most logarithms
                       */
        (void)frexp(rest, &exponent);
        if (!(logit + (1 - exponent) * 0.6931471805599454 > best)) {
            continue;
        }
        const double value = logit - log(-log1p(-rest));
        if (value > best) {
            best = value;
            tokens->selected = (int64_t)i;
        }
    }
}

static void race_reset(struct llama_sampler *sampler) { ((race *)sampler->ctx)->drawn = 0; }

static void race_free(struct llama_sampler *sampler) { free(sampler->ctx); }

static struct llama_sampler *race_clone(const struct llama_sampler *sampler);

static void race_copy_state(const struct llama_sampler *from, struct llama_sampler *to) {
    *(race *)to->ctx = *(const race *)from->ctx;
}

static struct llama_sampler_i race_interface = {
    .name = race_name,
    .apply = race_apply,
    .reset = race_reset,
    .clone = race_clone,
    .free = race_free,
    .copy_state = race_copy_state,
};

static struct llama_sampler *make(race state) {
    race *own = malloc(sizeof *own);
    if (!own) {
        return NULL;
    }
    *own = state;
    struct llama_sampler *sampler = state.init(&race_interface, own);
    if (!sampler) {
        free(own);
    }
    return sampler;
}

static struct llama_sampler *race_clone(const struct llama_sampler *sampler) { return make(*(race *)sampler->ctx); }

void *tf_race_sampler(void *init, uint32_t seed) {
    return make((race){.init = (sampler_init)(uintptr_t)init, .seed = seed});
}
