/* LoRA adapters (Hu et al., arXiv 2106.09685): y = W x + scale B A x for some of a model's
 * matrices, with A [rank, inputs] and B [outputs, rank].
 *
 * An adapter is a directory as PEFT writes it (adapter_config.json, adapter_model.safetensors), or
 * a GGUF file (general.type "adapter"). It may change q, k, v and o of layers with attention, and
 * gate, up and down of dense networks, where these are tensors of their own in the adapter's
 * naming. Everything else that a file asks for is refused by its name: it would be another
 * computation.
 *
 *   scale   lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora (arXiv 2312.03732); of a GGUF
 *           file adapter.lora.alpha / r, without that key 1
 *   site    a matrix that a step multiplies by: q, k and v are joined, gate and up are. `down` has
 *           the A of all its parts, [sum of ranks, inputs], and `up` has their B side by side,
 *           [outputs, sum of ranks], with zeros where a part does not read
 *   digest  SHA-256 of the numbers as they are used. Equal adapters have equal digests, whatever
 *           their format
 *
 * Read on any thread; immutable afterwards. Placed in a model by the thread that computes it. */
#ifndef KEEPD_MODEL_ADAPTER_H
#define KEEPD_MODEL_ADAPTER_H

#include "base/err.h"
#include "base/sha256.h"
#include "model/model.h"
#include "model/tensors.h"

#define ADAPTER_RANK_MAX 512 /* the largest rank of one matrix */

enum adapter_site { ADAPTER_QKV, ADAPTER_O, ADAPTER_GATE_UP, ADAPTER_DOWN, ADAPTER_SITES };

/* The products beside one matrix, in host memory. `down` NULL: there are none. */
struct adapter_product {
    float *down, *up;
    int64_t rank, rows, cols; /* rank: the sum of its parts' */
    int part_count;
    int64_t part_rows[SLOT_PARTS_MAX];
    float factors[SLOT_PARTS_MAX]; /* on the rows of each part */
    int groups;                    /* struct kern_matrix's */
    bool splits_rows;              /* the matrix has KERN_SHARD_ROWS, else KERN_SHARD_COLS */
};

struct adapter {
    struct adapter_product *products; /* [layers * ADAPTER_SITES], layer by layer */
    int layers;
    int rank;     /* the largest of a matrix */
    size_t bytes; /* memory of all numbers */
    uint8_t digest[SHA256_BYTES];
};

/* Reads the adapter at `path` for the model with this configuration. `most`: bytes that it may
 * take; more are ERR_LIMIT, before they are allocated. A fault names a file, a field or a tensor.
 */
int adapter_read(const struct model_config *config, const char *path, int64_t most,
                 struct adapter **out, struct fault *fault);
void adapter_close(struct adapter *adapter); /* NULL allowed */

#endif
