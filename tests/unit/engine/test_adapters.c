/* The table of adapters: what a replica does for it, holds nobody up. */
#include <criterion/criterion.h>

#include "base/mem.h"
#include "engine/adapters.h"
#include "model/internal.h"

static struct adapter_table table;
static int freed;

/* A slow backend: others must be able to use the table meanwhile. */
static void free_weight_in_use(struct kern *kern, struct kern_weight *weight) {
    (void)kern, (void)weight;
    freed++;
    cr_assert_eq(pthread_mutex_trylock(&table.lock), 0, "the table is locked");
    pthread_mutex_unlock(&table.lock);
    cr_assert_not(adapters_find(&table, "sql", NULL));
}

Test(adapters, the_table_is_free_while_weights_are_freed) {
    static const struct kern_ops ops = {.weight_free = free_weight_in_use};
    static char weight;
    struct kern kern = {.ops = &ops};
    struct model *model = mem_must_alloc(1, sizeof *model);
    struct kern_low_rank *products = mem_must_alloc(ADAPTER_SITES, sizeof *products);
    adapters_open(&table, 2, 1 << 20);
    model->kern = &kern;
    model->config.layers = 1;
    model->adapted.adapters[0] = products;
    products[0].down = products[0].up = (struct kern_weight *)(void *)&weight;
    table.slots[0] = (struct adapter_slot){
        .state = ADAPTER_LEAVING, .name = "sql", .asked = 1, .placed = 1, .bytes = 100};
    table.bytes = 100;
    adapters_attend(&table, 0, model);
    cr_expect_eq(freed, 2);
    cr_expect_eq(table.slots[0].state, ADAPTER_FREE);
    cr_expect_eq(table.bytes, 0);
    cr_expect_null(model->adapted.adapters[0]);
    adapters_close(&table);
    mem_free(model);
}
