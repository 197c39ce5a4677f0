#include "constrain/automaton.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/mem.h"

#define TABLE_SIZE      4096u
#define SEEN_SIZE       65536u /* well above CONSTRAIN_ITEMS_MAX */
#define SEEN_FEW        16u    /* up to this many items are compared one by one */
#define ITEMS_PER_WORK  8u     /* items with known derivatives that one unit of work pays for */
#define SORTED_PER_WORK 4u     /* items that one unit of work sorts */
#define MORE_STATES     (CONSTRAIN_PREPARED / 4u) /* automaton_prepare */
#define NO_STACK        0u                        /* the empty stack: nothing follows */
#define NEAR_LEVELS_MAX 16 /* levels of a stack that are replaced by near ones; the rest stays */

int automaton_open(struct automaton *a, struct node_pool *pool, uint32_t root) {
    *a = (struct automaton){.root = root, .generation = 1};
    a->stack_table = mem_try_alloc(TABLE_SIZE, sizeof *a->stack_table);
    a->state_table = mem_try_alloc(TABLE_SIZE, sizeof *a->state_table);
    if (a->stack_table == NULL || a->state_table == NULL) {
        automaton_close(a);
        return ERR_NOMEM;
    }
    a->stack_table_size = a->state_table_size = TABLE_SIZE;
    node_classes(pool);
    a->pool = *pool;
    a->compiled = node_pool_mark(&a->pool);
    a->pool.limit = a->pool.count + CONSTRAIN_LAZY_NODES_MAX;
    a->pool.levels_limit = CONSTRAIN_LAZY_LEVELS_MAX;
    *pool = (struct node_pool){0};
    a->stack_count = 1;
    a->state_count = AUTOMATON_DEAD + 1;
    return 0;
}

void automaton_close(struct automaton *a) {
    node_pool_close(&a->pool);
    mem_free(a->stacks);
    mem_free(a->stack_table);
    mem_free(a->items);
    mem_free(a->states);
    mem_free(a->moves);
    mem_free(a->state_table);
    mem_free(a->open);
    mem_free(a->seen);
    *a = (struct automaton){0};
}

/* Forgets states, items and stacks. */
static void forget_states(struct automaton *a) {
    a->generation++;
    a->start = 0;
    a->stack_count = 1;
    a->item_count = a->open_count = a->work_count = 0;
    a->state_count = AUTOMATON_DEAD + 1;
    memset(a->stack_table, 0, a->stack_table_size * sizeof *a->stack_table);
    memset(a->state_table, 0, a->state_table_size * sizeof *a->state_table);
}

void automaton_reset(struct automaton *a) {
    node_pool_reset(&a->pool, &a->compiled);
    forget_states(a);
}

size_t automaton_bytes(const struct automaton *a) {
    size_t row = (size_t)a->pool.classes * sizeof *a->moves;
    return node_pool_bytes(&a->pool) + a->stack_capacity * sizeof *a->stacks +
           a->item_capacity * sizeof *a->items + a->state_capacity * (sizeof *a->states + row) +
           a->open_capacity * sizeof *a->open +
           (a->seen != NULL ? SEEN_SIZE * sizeof *a->seen : 0) +
           (a->stack_table_size + a->state_table_size) * sizeof *a->state_table;
}

void automaton_shrink(struct automaton *a) {
    size_t row = (size_t)a->pool.classes * sizeof *a->moves;
    uint32_t rows = a->state_capacity;
    node_pool_shrink(&a->pool);
    node_shrink(&a->stacks, a->stack_count, &a->stack_capacity, sizeof *a->stacks);
    node_shrink(&a->items, a->item_count, &a->item_capacity, sizeof *a->items);
    node_shrink(&a->states, a->state_count, &a->state_capacity, sizeof *a->states);
    node_shrink(&a->moves, a->state_capacity, &rows, row); /* one row for each place of `states` */
    node_shrink(&a->open, a->open_count, &a->open_capacity, sizeof *a->open);
}

void automaton_prepare(struct automaton *a) {
    struct node_pool *pool = &a->pool;
    size_t row = (size_t)pool->classes * sizeof *a->moves;
    uint32_t capacity = a->state_capacity;
    node_pool_prepare(pool);
    node_prepare(pool, &a->moves, a->state_count, &capacity, row, MORE_STATES);
    node_prepare(pool, &a->states, a->state_count, &a->state_capacity, sizeof *a->states,
                 MORE_STATES);
    node_prepare(pool, &a->items, a->item_count, &a->item_capacity, sizeof *a->items, MORE_STATES);
}

/* ---- Stacks ---- */

static uint32_t *stack_head(struct automaton *a, uint32_t node, uint32_t below) {
    return &a->stack_table[node_mix(node_mix(1, node), below) & (a->stack_table_size - 1)];
}

static uint32_t push_stack(struct automaton *a, uint32_t node, uint32_t below) {
    if (node == NODE_EMPTY) return below;
    uint32_t *head = stack_head(a, node, below);
    for (uint32_t id = *head; id != 0; id = a->stacks[id].next)
        if (a->stacks[id].node == node && a->stacks[id].below == below) return id;
    if (a->stack_count >= CONSTRAIN_STACKS_MAX) a->pool.rc = ERR_LIMIT;
    if (a->pool.rc != 0 || !node_reserve(&a->pool, &a->stacks, a->stack_count, &a->stack_capacity,
                                         sizeof *a->stacks, 1))
        return NO_STACK;
    a->stacks[a->stack_count] = (struct automaton_stack){node, below, *head};
    *head = a->stack_count;
    return a->stack_count++;
}

/* ---- Closure ---- */

static bool is_item(const struct automaton_item *item, uint32_t node, uint32_t stack) {
    return item->node == node && item->stack == stack;
}

/* Returns the entry of an item in `seen`: its own, or the free one where it belongs. */
static struct automaton_seen *find_seen(struct automaton *a, uint32_t node, uint32_t stack) {
    uint32_t at = node_mix(node_mix(2, node), stack) & (SEEN_SIZE - 1);
    while (a->seen[at].stamp == a->stamp && !is_item(&a->open[a->seen[at].index], node, stack))
        at = (at + 1) & (SEEN_SIZE - 1);
    return &a->seen[at];
}

static void note_seen(struct automaton *a, uint32_t index) {
    *find_seen(a, a->open[index].node, a->open[index].stack) =
        (struct automaton_seen){a->stamp, index};
}

static bool is_open(struct automaton *a, uint32_t node, uint32_t stack) {
    if (a->open_count > SEEN_FEW) return find_seen(a, node, stack)->stamp == a->stamp;
    for (uint32_t i = 0; i < a->open_count; i++)
        if (is_item(&a->open[i], node, stack)) return true;
    return false;
}

/* Allocates the table of seen items, which few languages need. */
static bool open_seen(struct automaton *a) {
    if (a->seen == NULL) a->seen = mem_try_alloc(SEEN_SIZE, sizeof *a->seen);
    if (a->seen == NULL) a->pool.rc = ERR_NOMEM;
    return a->seen != NULL;
}

static void add_open(struct automaton *a, uint32_t node, uint32_t stack) {
    if (a->pool.rc != 0 || is_open(a, node, stack)) return;
    if (a->open_count >= CONSTRAIN_ITEMS_MAX) a->pool.rc = ERR_LIMIT;
    if (a->pool.rc != 0 ||
        !node_reserve(&a->pool, &a->open, a->open_count, &a->open_capacity, sizeof *a->open, 1))
        return;
    if (!node_work(&a->pool, 1)) return;
    a->open[a->open_count++] = (struct automaton_item){node, stack};
    if (a->open_count == SEEN_FEW + 1 && open_seen(a))
        for (uint32_t i = 0; i < SEEN_FEW; i++) note_seen(a, i);
    if (a->open_count > SEEN_FEW && a->pool.rc == 0) note_seen(a, a->open_count - 1);
}

/* Adds the expression that follows a matched node: the top of the item's stack. */
static void add_below(struct automaton *a, uint32_t stack) {
    if (stack == NO_STACK)
        a->accepts = true;
    else
        add_open(a, a->stacks[stack].node, a->stacks[stack].below);
}

/* Adds the items that an item stands for whose node refers to a rule. */
static void expand(struct automaton *a, const struct node *node, uint32_t stack) {
    struct node_pool *pool = &a->pool;
    switch ((enum node_kind)node->kind) {
    case NODE_KIND_SEQ:
        add_open(a, node->a, push_stack(a, node->b, stack));
        break;
    case NODE_KIND_ALT:
        for (uint32_t i = 0; i < node->b && pool->rc == 0; i++)
            add_open(a, pool->children[node->a + i], stack);
        break;
    case NODE_KIND_REPEAT: {
        uint32_t min = node->min > 0 ? node->min - 1 : 0;
        uint32_t max = node->max == NODE_ENDLESS ? NODE_ENDLESS : node->max - 1;
        uint32_t body = node->a, rest = node_repeat(pool, body, min, max);
        if (node->min == 0) add_below(a, stack);
        add_open(a, body, push_stack(a, rest, stack));
        break;
    }
    case NODE_KIND_RULE:
        add_open(a, pool->rules[node->a], stack);
        break;
    default:
        CHECK_MSG(false, "a node of kind %d is regular", node->kind);
    }
}

/* Adds items until every open one that is not regular, or that accepts "", has been followed. */
static void close_items(struct automaton *a) {
    while (a->work_count < a->open_count && a->pool.rc == 0) {
        struct automaton_item item = a->open[a->work_count++];
        struct node node = *node_at(&a->pool, item.node); /* a copy: the pool may grow */
        if (!node.regular)
            expand(a, &node, item.stack);
        else if (node.nullable)
            add_below(a, item.stack);
    }
}

/* ---- States ---- */

static int compare_items(const void *x, const void *y) {
    const struct automaton_item *a = x, *b = y;
    if (a->node != b->node) return a->node < b->node ? -1 : 1;
    return (a->stack > b->stack) - (a->stack < b->stack);
}

static bool is_state(const struct automaton *a, const struct automaton_state *state, uint32_t count,
                     bool accepts) {
    if (state->count != count || state->accepts != accepts) return false;
    return count == 0 || memcmp(a->items + state->first, a->open, count * sizeof *a->open) == 0;
}

static uint32_t *state_head(struct automaton *a, const struct automaton_item *items, uint32_t count,
                            bool accepts) {
    uint32_t hash = accepts;
    for (uint32_t i = 0; i < count; i++)
        hash = node_mix(node_mix(hash, items[i].node), items[i].stack);
    return &a->state_table[hash & (a->state_table_size - 1)];
}

static uint32_t new_state(struct automaton *a, uint32_t count, bool accepts, uint32_t *head) {
    uint32_t id = a->state_count, capacity = a->state_capacity;
    size_t row = (size_t)a->pool.classes;
    if (id >= CONSTRAIN_STATES_MAX || count > CONSTRAIN_ITEMS_KEPT_MAX - a->item_count)
        a->pool.rc = ERR_LIMIT;
    if (a->pool.rc != 0 ||
        !node_reserve(&a->pool, &a->items, a->item_count, &a->item_capacity, sizeof *a->items,
                      count) ||
        !node_reserve(&a->pool, &a->moves, id, &capacity, row * sizeof *a->moves, 1) ||
        !node_reserve(&a->pool, &a->states, id, &a->state_capacity, sizeof *a->states, 1))
        return 0;
    memset(a->moves + (size_t)id * row, 0, row * sizeof *a->moves);
    if (count > 0) memcpy(a->items + a->item_count, a->open, count * sizeof *a->open);
    a->states[id] = (struct automaton_state){
        .first = a->item_count, .count = count, .next = *head, .accepts = accepts};
    a->item_count += count;
    *head = id;
    a->state_count++;
    return id;
}

/* Returns the state of the open items. */
static uint32_t finish_state(struct automaton *a) {
    uint32_t count = 0;
    close_items(a);
    if (a->pool.rc != 0) return 0;
    for (uint32_t i = 0; i < a->open_count; i++)
        if (node_at(&a->pool, a->open[i].node)->regular && a->open[i].node != NODE_EMPTY)
            a->open[count++] = a->open[i];
    if (count == 0 && !a->accepts) return AUTOMATON_DEAD;
    if (count > 1 && !node_work(&a->pool, count / SORTED_PER_WORK)) return 0;
    if (count > 1) qsort(a->open, count, sizeof *a->open, compare_items);
    uint32_t *head = state_head(a, a->open, count, a->accepts);
    for (uint32_t id = *head; id != 0; id = a->states[id].next)
        if (is_state(a, &a->states[id], count, a->accepts)) return id;
    return new_state(a, count, a->accepts, head);
}

static void open_items(struct automaton *a) {
    a->open_count = a->work_count = 0;
    a->accepts = false;
    if (++a->stamp != 0) return;
    if (a->seen != NULL) memset(a->seen, 0, SEEN_SIZE * sizeof *a->seen); /* stamps begin again */
    a->stamp = 1;
}

uint32_t automaton_start(struct automaton *a) {
    if (a->start != 0) return a->start;
    open_items(a);
    add_open(a, a->root, NO_STACK);
    a->start = finish_state(a);
    return a->start;
}

/* Stores the next state in the column of every class that is alike. */
static void note_move(struct automaton *a, uint32_t id, uint32_t next,
                      const struct byte_set *alike) {
    uint32_t *moves = a->moves + (size_t)id * (size_t)a->pool.classes;
    for (int class = 0; class < a->pool.classes; class ++)
        if (byte_set_has(alike, a->pool.example[class])) moves[class] = next;
}

uint32_t automaton_step(struct automaton *a, uint32_t id, int class) {
    struct node_pool *pool = &a->pool;
    struct byte_set alike = byte_set_all();
    if (id == AUTOMATON_DEAD) return AUTOMATON_DEAD;
    CHECK(id < a->state_count);
    uint32_t first = a->states[id].first, count = a->states[id].count;
    open_items(a);
    (void)node_work(pool, count / ITEMS_PER_WORK);
    for (uint32_t i = 0; i < count && pool->rc == 0; i++) {
        struct automaton_item item = a->items[first + i];
        pool->alike = alike;
        uint32_t node = node_derive(pool, item.node, class);
        alike = pool->alike; /* a copy, because node_is_alive derives and changes pool->alike */
        if (node != NODE_NONE && node_is_alive(pool, node)) add_open(a, node, item.stack);
    }
    uint32_t next = pool->rc == 0 ? finish_state(a) : 0;
    if (next != 0) note_move(a, id, next, &alike);
    return next;
}

/* ---- Near states ---- */

/* Returns a stack that agrees with the given one for `bytes` bytes. Recurses once for each level of
 * the stack that begins within them. */
static uint32_t near_stack(struct automaton *a, uint32_t stack, int64_t bytes, int levels) {
    if (stack == NO_STACK || bytes < 0 || a->pool.rc != 0) return NO_STACK;
    if (levels == 0 || !node_work(&a->pool, 1)) return stack;
    struct automaton_stack top = a->stacks[stack];
    int64_t left = bytes - node_at(&a->pool, top.node)->shortest;
    uint32_t below = near_stack(a, top.below, left, levels - 1);
    return push_stack(a, node_near(&a->pool, top.node, (uint32_t)bytes), below);
}

/* Can many tokens be read? Where few can, a mask costs less than a near state. */
static bool automaton_is_wide(const struct automaton *a, uint32_t first, uint32_t count) {
    for (uint32_t i = first; i < first + count; i++)
        if (node_at(&a->pool, a->items[i].node)->wide) return true;
    return false;
}

uint32_t automaton_near(struct automaton *a, uint32_t id, int i, uint32_t bytes) {
    uint32_t near = a->states[id].near[i], first = a->states[id].first, count = a->states[id].count;
    if (near != 0) return near;
    if (!automaton_is_wide(a, first, count)) return id;
    open_items(a);
    a->accepts = a->states[id].accepts;
    for (uint32_t k = 0; k < count && a->pool.rc == 0; k++) {
        struct automaton_item item = a->items[first + k];
        int64_t left = (int64_t)bytes - node_at(&a->pool, item.node)->shortest;
        uint32_t node = node_near(&a->pool, item.node, bytes);
        add_open(a, node, near_stack(a, item.stack, left, NEAR_LEVELS_MAX));
    }
    near = a->pool.rc == 0 ? finish_state(a) : 0;
    if (near != 0) a->states[id].near[i] = a->states[near].near[i] = near;
    return near;
}

/* Adds the items that follow a plain character. Returns AUTOMATON_DIFFERS if plain characters lead
 * to different items. */
static uint32_t open_plain(struct automaton *a, uint32_t first, uint32_t count) {
    for (uint32_t i = 0; i < count && a->pool.rc == 0; i++) {
        struct automaton_item item = a->items[first + i];
        uint32_t node = node_plain(&a->pool, item.node);
        if (node == NODE_DIFFERS) return AUTOMATON_DIFFERS;
        if (node != NODE_NONE && node_is_alive(&a->pool, node)) add_open(a, node, item.stack);
    }
    return 0;
}

uint32_t automaton_plain(struct automaton *a, uint32_t id) {
    if (id == AUTOMATON_DEAD) return id;
    if (a->states[id].plain != 0) return a->states[id].plain;
    open_items(a);
    uint32_t plain = open_plain(a, a->states[id].first, a->states[id].count);
    if (plain == 0 && a->pool.rc == 0) plain = finish_state(a);
    if (a->pool.rc != 0) return 0;
    a->states[id].plain = plain;
    return plain;
}

/* ---- Keeping states ---- */

/* Records by the old number of each node, stack and state whether to keep it: 0, or not 0; later
 * the new number. */
struct keeping {
    uint32_t *nodes; /* Says for each node, stack and state, by its old number, whether it is kept:
                        0, or not 0; later its new number. */
    uint32_t *stacks, *states;
    uint32_t stack_end, state_end; /* how many stacks and states there were before */
};

static bool open_keeping(const struct automaton *a, struct keeping *k) {
    *k = (struct keeping){.stack_end = a->stack_count, .state_end = a->state_count};
    k->nodes = mem_try_alloc(a->pool.count - a->compiled.nodes + 1, sizeof *k->nodes);
    k->stacks = mem_try_alloc(k->stack_end, sizeof *k->stacks);
    k->states = mem_try_alloc(k->state_end, sizeof *k->states);
    return k->nodes != NULL && k->stacks != NULL && k->states != NULL;
}

static void close_keeping(struct keeping *k) {
    mem_free(k->nodes);
    mem_free(k->stacks);
    mem_free(k->states);
}

static void keep_node(const struct automaton *a, struct keeping *k, uint32_t node) {
    if (node >= a->compiled.nodes) k->nodes[node - a->compiled.nodes] = 1;
}

static uint32_t kept_node(const struct automaton *a, const struct keeping *k, uint32_t node) {
    return node >= a->compiled.nodes ? k->nodes[node - a->compiled.nodes] : node;
}

/* Marks the nodes and stacks that the kept states use. A stack has a higher number than those below
 * it, so one pass from the end marks all. */
static void mark_parts(const struct automaton *a, struct keeping *k) {
    for (uint32_t id = AUTOMATON_DEAD + 1; id < k->state_end; id++) {
        const struct automaton_state *state = &a->states[id];
        for (uint32_t i = 0; k->states[id] != 0 && i < state->count; i++) {
            keep_node(a, k, a->items[state->first + i].node);
            k->stacks[a->items[state->first + i].stack] = 1;
        }
    }
    k->stacks[NO_STACK] = 0;
    for (uint32_t id = k->stack_end; id-- > NO_STACK + 1;) {
        if (k->stacks[id] == 0) continue;
        keep_node(a, k, a->stacks[id].node);
        if (a->stacks[id].below != NO_STACK) k->stacks[a->stacks[id].below] = 1;
    }
}

/* Moves the kept stacks together. Their order does not change, so items stay sorted. */
static void move_stacks(struct automaton *a, struct keeping *k) {
    for (uint32_t id = NO_STACK + 1; id < k->stack_end; id++) {
        if (k->stacks[id] == 0) continue;
        uint32_t node = kept_node(a, k, a->stacks[id].node), below = k->stacks[a->stacks[id].below];
        uint32_t *head = stack_head(a, node, below);
        a->stacks[a->stack_count] = (struct automaton_stack){node, below, *head};
        k->stacks[id] = *head = a->stack_count++;
    }
}

static void move_states(struct automaton *a, struct keeping *k) {
    size_t row = (size_t)a->pool.classes;
    for (uint32_t id = AUTOMATON_DEAD + 1; id < k->state_end; id++) {
        if (k->states[id] == 0) continue;
        struct automaton_state old = a->states[id];
        struct automaton_item *items = a->items + a->item_count;
        for (uint32_t i = 0; i < old.count; i++) {
            struct automaton_item item = a->items[old.first + i];
            items[i] = (struct automaton_item){kept_node(a, k, item.node), k->stacks[item.stack]};
        }
        uint32_t *head = state_head(a, items, old.count, old.accepts);
        a->states[a->state_count] = (struct automaton_state){
            .first = a->item_count, .count = old.count, .next = *head, .accepts = old.accepts};
        memset(a->moves + a->state_count * row, 0, row * sizeof *a->moves);
        a->item_count += old.count;
        k->states[id] = *head = a->state_count++;
    }
}

static void keep_marked(struct automaton *a, struct keeping *k) {
    mark_parts(a, k);
    node_pool_keep(&a->pool, &a->compiled, k->nodes);
    forget_states(a);
    move_stacks(a, k);
    move_states(a, k);
    a->pool.work += (a->pool.count - a->compiled.nodes) + a->stack_count + a->item_count;
}

void automaton_keep(struct automaton *a, uint32_t *states, int count) {
    struct keeping k;
    bool kept = open_keeping(a, &k);
    for (int i = 0; kept && i < count; i++) {
        CHECK(states[i] > AUTOMATON_DEAD && states[i] < a->state_count);
        k.states[states[i]] = 1;
    }
    if (kept)
        keep_marked(a, &k);
    else
        automaton_reset(a);
    for (int i = 0; i < count; i++) states[i] = kept ? k.states[states[i]] : 0;
    close_keeping(&k);
}

bool automaton_is_full(const struct automaton *a) {
    return a->pool.count - a->compiled.nodes > CONSTRAIN_LAZY_NODES_MAX / 2 ||
           a->pool.child_count - a->compiled.children > CONSTRAIN_CHILDREN_MAX / 2 ||
           a->stack_count > CONSTRAIN_STACKS_MAX / 2 ||
           a->item_count > CONSTRAIN_ITEMS_KEPT_MAX / 2;
}
