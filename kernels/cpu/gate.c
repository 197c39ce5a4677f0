/* Retention gates. Every path computes them in float32, because scores decide what is kept and an
 * entry's rank must not depend on the rounding of its inputs. */
#include <math.h>
#include <string.h>

#include "base/check.h"
#include "base/mem.h"
#include "kernels/cpu/alloc.h"
#include "kernels/cpu/internal.h"

struct kern_gate {
    int width, heads_kv, embeddings;
    struct kern_weight *w1, *w2; /* w2: rg10, otherwise NULL */
    float *b1, *b2;
    float *last; /* [heads_kv][width]: the row of each head */
    float *bias; /* [heads_kv] */
};

static float *gate_copy_floats(const float *from, int64_t count) {
    float *to = cpu_alloc((size_t)count * sizeof *to);
    if (to) memcpy(to, from, (size_t)count * sizeof *to);
    return to;
}

static int gate_load_layer(struct kern *kern, const float *w, int64_t rows, int64_t cols,
                           struct kern_weight **out, struct fault *fault) {
    struct kern_matrix matrix = {.data = w, .dtype = KERN_F32, .rows = rows, .cols = cols};
    return cpu_weight_load(kern, &matrix, 1, KERN_SHARD_NONE, out, fault);
}

static int gate_load_heads(struct kern_gate *gate, const struct kern_gate_spec *spec) {
    size_t width = (size_t)gate->width;
    gate->last = cpu_alloc((size_t)gate->heads_kv * width * sizeof(float));
    gate->bias = cpu_alloc((size_t)gate->heads_kv * sizeof(float));
    if (!gate->last || !gate->bias) return ERR_NOMEM;
    for (int head = 0; head < gate->heads_kv; head++) {
        CHECK(spec->row[head] >= 0 && spec->row[head] < spec->row_count);
        size_t row = (size_t)spec->row[head];
        memcpy(gate->last + (size_t)head * width, spec->last + row * width, width * sizeof(float));
        gate->bias[head] = spec->bias[row];
    }
    return 0;
}

/* Bytes of both hidden layers of one pass. */
static size_t hidden_bytes(const struct kern_gate *gate) {
    size_t first = (size_t)gate->embeddings * (size_t)gate->width;
    size_t second = gate->w2 ? first : 0;
    return MATMUL_ROWS * (first + second) * sizeof(float);
}

int cpu_gate_load(struct kern *kern, const struct kern_gate_spec *whole, struct kern_gate **out,
                  struct fault *fault) {
    struct kern_gate_spec own = *whole;
    const struct kern_gate_spec *spec = &own;
    shard_gate(cpu_of(kern)->comm, &own);
    CHECK(spec->width > 0 && spec->d_model > 0 && spec->heads_kv > 0);
    CHECK(spec->embeddings == 1 || spec->embeddings == spec->heads_kv);
    CHECK(!spec->w2 || spec->embeddings == 1);
    struct kern_gate *gate = mem_try_alloc(1, sizeof *gate);
    if (!gate) return fault_set(fault, ERR_NOMEM, "", "no memory for a gate");
    gate->width = spec->width;
    gate->heads_kv = spec->heads_kv;
    gate->embeddings = spec->embeddings;
    int64_t first = (int64_t)spec->embeddings * spec->width;
    int rc = gate_load_layer(kern, spec->w1, first, spec->d_model, &gate->w1, fault);
    if (!rc && spec->w2)
        rc = gate_load_layer(kern, spec->w2, spec->width, spec->width, &gate->w2, fault);
    if (rc) goto fail;
    gate->b1 = gate_copy_floats(spec->b1, first);
    gate->b2 = spec->w2 ? gate_copy_floats(spec->b2, spec->width) : NULL;
    rc = gate_load_heads(gate, spec);
    if (!gate->b1 || (spec->w2 && !gate->b2)) rc = ERR_NOMEM;
    if (!rc) rc = cpu_room_grow(&cpu_of(kern)->hidden, hidden_bytes(gate));
    if (rc) {
        fault_set(fault, rc, "", "no memory for a gate");
        goto fail;
    }
    *out = gate;
    return 0;
fail:
    cpu_gate_free(kern, gate);
    return rc;
}

void cpu_gate_free(struct kern *kern, struct kern_gate *gate) {
    if (!gate) return;
    cpu_weight_free(kern, gate->w1);
    cpu_weight_free(kern, gate->w2);
    cpu_free(gate->b1);
    cpu_free(gate->b2);
    cpu_free(gate->last);
    cpu_free(gate->bias);
    mem_free(gate);
}

/* ---- Applying ---- */

static void silu_in_place(float *h, int64_t count) {
    for (int64_t i = 0; i < count; i++) h[i] = h[i] / (1.0f + expf(-h[i]));
}

static float log_sigmoid(float z) {
    return fminf(z, 0.0f) - log1pf(expf(-fabsf(z)));
}

static void log_betas(const struct kern_gate *gate, const float *h, float *out) {
    for (int head = 0; head < gate->heads_kv; head++) {
        const float *last = gate->last + (size_t)head * (size_t)gate->width;
        const float *mine = gate->embeddings > 1 ? h + (size_t)head * (size_t)gate->width : h;
        float z = 0;
        for (int i = 0; i < gate->width; i++) z += last[i] * mine[i];
        out[head] = log_sigmoid(z + gate->bias[head]);
    }
}

void cpu_gate(struct kern *kern, float *log_beta, const float *x, const struct kern_gate *gate,
              int rows) {
    struct cpu *cpu = cpu_of(kern);
    int64_t first = gate->w1->rows, d_model = gate->w1->cols;
    float *h1 = cpu->hidden.mem, *h2 = h1 + MATMUL_ROWS * first;
    for (int row = 0; row < rows; row += MATMUL_ROWS) {
        int count = rows - row < MATMUL_ROWS ? rows - row : MATMUL_ROWS;
        cpu_matmul(kern, h1, x + row * d_model, gate->w1, gate->b1, count, KERN_SET);
        silu_in_place(h1, count * first);
        if (gate->w2) {
            cpu_matmul(kern, h2, h1, gate->w2, gate->b2, count, KERN_SET);
            silu_in_place(h2, count * first);
        }
        for (int i = 0; i < count; i++)
            log_betas(gate, (gate->w2 ? h2 : h1) + i * first,
                      log_beta + (int64_t)(row + i) * gate->heads_kv);
    }
}
