/* The sampler that draws by a race: its distribution, copies, and odd tokens. llama_sampler_init is a stand-in. */
#include "llama.h"
#include "test.h"

static struct llama_sampler *init(struct llama_sampler_i *interface, llama_sampler_context_t context) {
    struct llama_sampler *sampler = test_alloc(sizeof *sampler);
    sampler->iface = interface;
    sampler->ctx = context;
    return sampler;
}

static struct llama_sampler *no_memory(struct llama_sampler_i *interface, llama_sampler_context_t context) {
    (void)interface;
    (void)context;
    return NULL;
}

static struct llama_sampler *make(uint32_t seed) {
    struct llama_sampler *sampler = tf_race_sampler((void *)(uintptr_t)init, seed);
    CHECK(sampler != NULL && strcmp(sampler->iface->name(sampler), "race") == 0);
    return sampler;
}

static void done(struct llama_sampler *sampler) {
    sampler->iface->free(sampler);
    free(sampler);
}

static llama_token draw(struct llama_sampler *sampler, size_t n, const llama_token *ids, const float *logits) {
    llama_token_data *data = test_alloc(n * sizeof *data);
    for (size_t i = 0; i < n; i++) {
        data[i] = (llama_token_data){.id = ids[i], .logit = logits[i]};
    }
    llama_token_data_array tokens = {.data = data, .size = n, .selected = -1};
    sampler->iface->apply(sampler, &tokens);
    CHECK(tokens.size == n && tokens.selected >= 0 && tokens.selected < (int64_t)n);
    const llama_token token = data[tokens.selected].id;
    free(data);
    return token;
}

int main(void) {
    const llama_token ids[4] = {7, 3, 150000, 0}, turned[4] = {0, 150000, 3, 7};
    const float p[4] = {0.5f, 0.3f, 0.15f, 0.05f};
    float logits[4], backwards[4];
    for (int i = 0; i < 4; i++) {
        logits[i] = logf(p[i]) + 2.0f;
        backwards[3 - i] = logits[i] - 5.0f;
    }
    struct llama_sampler *one = make(1), *same = make(1), *other = make(2);
    int counts[4] = {0}, differ = 0;
    const int draws = 100000;
    for (int i = 0; i < draws; i++) {
        const llama_token token = draw(one, 4, ids, logits);
        for (int place = 0; place < 4; place++) {
            counts[place] += ids[place] == token;
        }
        CHECK(draw(same, 4, turned, backwards) == token); /* neither order nor scale matters */
        differ += draw(other, 4, ids, logits) != token;
    }
    double chi_square = 0.0;
    for (int i = 0; i < 4; i++) {
        const double expected = (double)p[i] * draws;
        chi_square += (counts[i] - expected) * (counts[i] - expected) / expected;
    }
    CHECK(chi_square < 21.1);                                   /* p = 1e-4 with 3 degrees of freedom */
    CHECK(fabs((double)differ / draws - (1.0 - 0.365)) < 0.01); /* independent: 1 - the sum of p squared */

    struct llama_sampler *copy = one->iface->clone(one);
    const llama_token next = draw(one, 4, ids, logits);
    CHECK(draw(copy, 4, ids, logits) == next);
    one->iface->reset(one);
    other->iface->copy_state(one, other);
    struct llama_sampler *fresh = make(1);
    for (int i = 0; i < 50; i++) {
        const llama_token token = draw(fresh, 4, ids, logits);
        CHECK(draw(one, 4, ids, logits) == token && draw(other, 4, ids, logits) == token);
    }

    const float odd[4] = {-INFINITY, NAN, 1.0f, -INFINITY}, hopeless[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
    for (int i = 0; i < 100; i++) {
        CHECK(draw(one, 4, ids, odd) == 150000);
        CHECK(draw(one, 1, ids, logits) == 7);
        draw(one, 4, ids, hopeless);
    }
    llama_token_data_array none = {.data = NULL, .size = 0, .selected = 0};
    one->iface->apply(one, &none);
    CHECK(none.selected == -1);
    CHECK(tf_race_sampler((void *)(uintptr_t)no_memory, 1) == NULL);
    done(one), done(same), done(other), done(copy), done(fresh);
    return 0;
}
