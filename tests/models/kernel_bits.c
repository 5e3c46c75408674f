/* Prints a hash of the results of each kernel, on shapes that leave some lanes over. */
#include <stdio.h>
#include "kernels.c"

static uint32_t state = 1;

/* Equally distributed in [-1, 1), the same on every machine. */
static float *numbers(int64_t count)
{
    float *x = malloc(count * sizeof(float));
    for (int64_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        x[i] = (float)(int32_t)(state & 0xffffff00u) / 2147483648.0f;
    }
    return x;
}

static float *zeros(int64_t count) { return calloc(count, sizeof(float)); }

static void show(const char *name, const float *x, int64_t count)
{
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    for (int64_t i = 0; i < count * 4; i++) hash = (hash ^ ((const uint8_t *)x)[i]) * 1099511628211u;
    printf("%s %016llx %g\n", name, (unsigned long long)hash, (double)x[count / 2]);
}

static void products(void)
{
    enum { ROWS = 13, INPUTS = 96, OUTPUTS = 70, PADDED = 96 };
    float *x = numbers(ROWS * INPUTS), *w = numbers(OUTPUTS * INPUTS), *bias = numbers(PADDED), *out = zeros(ROWS * OUTPUTS);
    for (int kind = FLOAT32; kind <= INT8; kind += INT8 - FLOAT32) {
        float *panels = zeros(PADDED * INPUTS), *scale = zeros(PADDED);
        perilune_pack(w, OUTPUTS, INPUTS, INPUTS, kind, 0, panels, scale, 1);
        struct weight weight = {panels, scale, bias, OUTPUTS, INPUTS, kind};
        for (int rows = 1; rows <= ROWS; rows++) {
            perilune_linear(x, rows, INPUTS, &weight, out, NULL, 1);
            show(kind == INT8 ? "product in int8" : "product in float32", out, rows * OUTPUTS);
        }
    }
}

static void rows(void)
{
    enum { COUNT = 9, SIZE = 80, WORDS = 1001, ODD = 37 };
    float *x = numbers(COUNT * SIZE), *w = numbers(SIZE), *dy = numbers(COUNT * SIZE);
    float *out = zeros(COUNT * SIZE), *factor = zeros(COUNT), *dx = zeros(COUNT * SIZE), *dw = zeros(SIZE);
    perilune_rms_norm(x, COUNT, SIZE, w, 1, 1e-6f, out, factor, 1);
    perilune_rms_norm_backward(x, COUNT, SIZE, w, 1, factor, dy, dx, dw, 1);
    show("norm", out, COUNT * SIZE);
    show("gradient of the norm", dx, COUNT * SIZE);
    show("gradient of its weight", dw, SIZE);
    float *cosine = numbers(COUNT * SIZE / 2), *sine = numbers(COUNT * SIZE / 2);
    perilune_rotate(x, COUNT, 1, SIZE - SIZE % 32, cosine, sine, SIZE / 2, 1.0f, out, 1);
    show("rotation", out, COUNT * (SIZE - SIZE % 32));
    float *logits = numbers(COUNT * WORDS), *logprobs = zeros(COUNT), *normalizers = zeros(2 * COUNT), *entropy = zeros(COUNT);
    int64_t tokens[COUNT] = {0, 1, 500, 1000, 7, 8, 9, 15, 16};
    for (int i = 0; i < COUNT * WORDS; i++) logits[i] *= 9.0f;
    perilune_token_logprobs(logits, COUNT, WORDS, tokens, 0.7f, logprobs, normalizers, entropy, 1);
    show("log-probs", logprobs, COUNT);
    show("entropy", entropy, COUNT);
    float *gate = numbers(COUNT * ODD), *up = numbers(COUNT * ODD), *grad = numbers(COUNT * ODD), *d_gate = zeros(COUNT * ODD), *d_up = zeros(COUNT * ODD);
    perilune_swiglu_backward(gate, up, grad, COUNT, ODD, d_gate, d_up, 1);
    show("gradient of the gate", d_gate, COUNT * ODD);
    perilune_gated(gate, up, COUNT, ODD, GELU_TANH, d_up, 1);
    show("gate", d_up, COUNT * ODD);
}

static void attention(int64_t heads)
{
    enum { TOKENS = 70, SIZE = 48 };
    int64_t starts[] = {0, 40}, lengths[] = {40, 30}, prefix_starts[] = {0, 0}, prefixes[] = {0, 40}, family[] = {0, 2};
    float *out = zeros(TOKENS * heads * SIZE), *total = zeros(TOKENS * heads), *grad_q = zeros(TOKENS * heads * SIZE);
    struct packed p = {.q = numbers(TOKENS * heads * SIZE), .k = numbers(TOKENS * SIZE), .v = numbers(TOKENS * SIZE),
                       .q_stride = heads * SIZE, .k_stride = SIZE, .v_stride = SIZE, .heads = heads, .kv_heads = 1,
                       .size = SIZE, .window = 33, .sequences = 2, .starts = starts, .lengths = lengths,
                       .prefix_starts = prefix_starts, .prefixes = prefixes, .scale = 0.2f, .out = out, .log_total = total,
                       .grad_out = numbers(TOKENS * heads * SIZE), .grad_q = grad_q, .grad_k = zeros(TOKENS * SIZE),
                       .grad_v = zeros(TOKENS * SIZE), .family = family, .families = 1};
    perilune_attend_packed(&p, 1);
    perilune_attend_packed_backward(&p, 1);
    show("attention", out, TOKENS * heads * SIZE);
    show("gradient of queries", grad_q, TOKENS * heads * SIZE);
    show("gradient of keys", p.grad_k, TOKENS * SIZE);
    show("gradient of values", p.grad_v, TOKENS * SIZE);
}

static void delta_rule(void)
{
    enum { TOKENS = 20, HEADS = 2, KEYS = 24, VALUES = 40, K = TOKENS * HEADS * KEYS, V = TOKENS * HEADS * VALUES };
    struct piece piece = {0, TOKENS, -1, 0};
    struct delta d = {.q = numbers(K), .k = numbers(K), .v = numbers(V), .decay = numbers(TOKENS * HEADS),
                      .strength = numbers(TOKENS * HEADS), .q_stride = HEADS * KEYS, .k_stride = HEADS * KEYS,
                      .v_stride = HEADS * VALUES, .heads = HEADS, .key_heads = HEADS, .key_size = KEYS, .value_size = VALUES,
                      .tokens = TOKENS, .pieces = 1, .piece = &piece, .states = zeros(HEADS * KEYS * VALUES), .out = zeros(V),
                      .grad_out = numbers(V), .grad_q = zeros(K), .grad_k = zeros(K), .grad_v = zeros(V),
                      .grad_decay = zeros(TOKENS * HEADS), .grad_strength = zeros(TOKENS * HEADS),
                      .grad_states = zeros(HEADS * KEYS * VALUES)};
    perilune_scan(&d, 1);
    perilune_scan_backward(&d, 1);
    show("delta rule", d.out, V);
    show("its gradient of queries", d.grad_q, K);
    show("its gradient of keys", d.grad_k, K);
    show("its gradient of values", d.grad_v, V);
    show("its gradient of decays", d.grad_decay, TOKENS * HEADS);
}

int main(void)
{
    products();
    rows();
    for (int heads = 1; heads <= 5; heads++) attention(heads);
    delta_rule();
    return 0;
}
