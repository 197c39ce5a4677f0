/* Adapters in a model: places their matrices in the backend, and adds their products to those of a
 * step, adapter by adapter. */
#include "base/check.h"
#include "base/mem.h"
#include "model/adapter.h"
#include "model/internal.h"

/* ---- Places ---- */

static void free_low_rank(struct kern *kern, struct kern_low_rank *products, int count) {
    for (int i = 0; products && i < count; i++) {
        /* the backend's own type is not const */
        struct kern_weight *down = (struct kern_weight *)(uintptr_t)products[i].down;
        struct kern_weight *up = (struct kern_weight *)(uintptr_t)products[i].up;
        if (down) kern->ops->weight_free(kern, down);
        if (up) kern->ops->weight_free(kern, up);
    }
    mem_free(products);
}

void model_remove_adapter(struct model *model, int number) {
    CHECK(number > 0 && number <= MODEL_ADAPTERS_MAX);
    free_low_rank(model->kern, model->adapted.adapters[number - 1],
                  model->config.layers * ADAPTER_SITES);
    model->adapted.adapters[number - 1] = NULL;
}

static int place_low_rank(struct model *model, const struct adapter_product *from,
                          struct kern_low_rank *to, struct fault *fault) {
    struct kern *kern = model->kern;
    const bool rows = from->splits_rows;
    struct kern_matrix parts[SLOT_PARTS_MAX] = {0};
    const struct kern_matrix down = {
        .data = from->down, .dtype = KERN_F32, .rows = from->rank, .cols = from->cols};
    struct kern_weight *weight = NULL;
    const float *at = from->up;
    for (int i = 0; i < from->part_count; i++) {
        parts[i] = (struct kern_matrix){.data = at,
                                        .dtype = KERN_F32,
                                        .rows = from->part_rows[i],
                                        .cols = from->rank,
                                        .groups = rows ? from->groups : 0,
                                        .factor = from->factors[i]};
        at += from->part_rows[i] * from->rank;
    }
    int rc = kern->ops->weight_load(kern, &down, 1, rows ? KERN_SHARD_NONE : KERN_SHARD_COLS,
                                    &weight, fault);
    if (rc) return rc;
    to->down = weight;
    weight = NULL;
    rc = kern->ops->weight_load(kern, parts, from->part_count,
                                rows ? KERN_SHARD_ROWS : KERN_SHARD_NONE, &weight, fault);
    to->up = weight;
    return rc;
}

int model_place_adapter(struct model *model, int number, const struct adapter *adapter,
                        struct fault *fault) {
    const int count = model->config.layers * ADAPTER_SITES;
    CHECK(number > 0 && number <= MODEL_ADAPTERS_MAX && model->adapted.rows);
    CHECK(!model->adapted.adapters[number - 1] && adapter->layers == model->config.layers);
    struct kern_low_rank *products = mem_try_alloc((size_t)count, sizeof *products);
    if (!products) return fault_set(fault, ERR_NOMEM, "", "no memory for an adapter");
    int rc = 0;
    for (int i = 0; i < count && !rc; i++) {
        products[i].in = model->adapted.in;
        products[i].low = model->adapted.low;
        products[i].out = model->adapted.out;
        if (adapter->products[i].down)
            rc = place_low_rank(model, &adapter->products[i], &products[i], fault);
    }
    if (rc)
        free_low_rank(model->kern, products, count);
    else
        model->adapted.adapters[number - 1] = products;
    return rc;
}

static int larger_of(int a, int b) {
    return a > b ? a : b;
}

int model_open_adapted(struct model *model, bool check_only, struct fault *fault) {
    const struct model_config *c = &model->config;
    struct adapted *adapted = &model->adapted;
    int in = larger_of(c->d_model, dense_width(c)), out = larger_of(c->d_model, 2 * dense_width(c));
    for (int i = 0; i < c->layers; i++) {
        in = larger_of(in, heads_width(c, i));
        out = larger_of(out, attend_width(c, i));
    }
    const struct {
        float **room;
        int width;
    } rooms[] = {{&adapted->in, in},
                 {&adapted->low, SLOT_PARTS_MAX * ADAPTER_RANK_MAX},
                 {&adapted->out, out}};
    if (!model->kern->ops->low_rank)
        return fault_set(fault, ERR_UNSUPPORTED, "lora",
                         "the %s backend computes no adapters: serve them with --device cpu",
                         model->kern->ops->name);
    for (size_t i = 0; i < sizeof rooms / sizeof *rooms; i++) {
        const size_t bytes = (size_t)ADAPTED_ROWS * (size_t)rooms[i].width * sizeof(float);
        model->step_bytes += bytes;
        if (check_only) continue;
        *rooms[i].room = model->kern->ops->mem_alloc(model->kern, bytes);
        if (!*rooms[i].room)
            return fault_set(fault, ERR_NOMEM, "lora", "no memory for products of adapters");
    }
    if (check_only) return 0;
    adapted->of_row = mem_must_alloc((size_t)model->rows_max, sizeof *adapted->of_row);
    adapted->rows = mem_must_alloc((size_t)model->rows_max, sizeof *adapted->rows);
    return 0;
}

void model_close_adapted(struct model *model) {
    struct adapted *adapted = &model->adapted;
    float *const rooms[] = {adapted->in, adapted->low, adapted->out};
    for (int i = 1; i <= MODEL_ADAPTERS_MAX; i++)
        if (adapted->adapters[i - 1]) model_remove_adapter(model, i);
    for (size_t i = 0; i < sizeof rooms / sizeof *rooms; i++)
        if (rooms[i]) model->kern->ops->mem_free(model->kern, rooms[i]);
    mem_free(adapted->of_row);
    mem_free(adapted->rows);
}

/* ---- A step ---- */

/* Lists the rows of each adapter, among `count` rows that are the step's rows `index` (NULL: all).
 */
static void group_adapted_rows(struct adapted *adapted, const int32_t *index, int count) {
    int filled = 0;
    adapted->group_count = 0;
    for (int number = 1; number <= MODEL_ADAPTERS_MAX && filled < count; number++) {
        const int first = filled;
        if (!adapted->adapters[number - 1]) continue;
        for (int i = 0; i < count; i++)
            if (adapted->of_row[index ? index[i] : i] == number) adapted->rows[filled++] = i;
        if (filled > first)
            adapted->groups[adapted->group_count++] = (struct adapted_group){
                adapted->adapters[number - 1], adapted->rows + first, filled - first};
    }
}

void model_adapt_batch(struct model *model, const struct kern_batch *batch) {
    struct adapted *adapted = &model->adapted;
    bool any = false;
    adapted->group_count = 0;
    for (int i = 0; i < batch->span_count; i++) any = any || batch->spans[i].adapter;
    if (!any) return;
    CHECK(adapted->rows);
    for (int i = 0; i < batch->span_count; i++) {
        const struct kern_span *span = &batch->spans[i];
        CHECK(!span->adapter || adapted->adapters[span->adapter - 1]);
        for (int32_t k = 0; k < span->count; k++) adapted->of_row[span->row + k] = span->adapter;
    }
    group_adapted_rows(adapted, NULL, batch->rows);
}

void model_adapt_wanted(struct model *model, const int32_t *want, int count) {
    if (model->adapted.group_count) group_adapted_rows(&model->adapted, want, count);
}

void model_adapt(struct model *model, int layer, enum adapter_site site, float *y, const float *x) {
    struct kern *kern = model->kern;
    for (int g = 0; g < model->adapted.group_count; g++) {
        const struct adapted_group *group = &model->adapted.groups[g];
        const struct kern_low_rank *products = &group->products[layer * ADAPTER_SITES + (int)site];
        for (int at = 0; at < group->count && products->down; at += ADAPTED_ROWS) {
            const int left = group->count - at;
            kern->ops->low_rank(kern, y, x, products, group->rows + at,
                                left < ADAPTED_ROWS ? left : ADAPTED_ROWS);
        }
    }
}
