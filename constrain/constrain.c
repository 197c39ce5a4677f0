#include "constrain/constrain.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "base/check.h"
#include "base/mem.h"
#include "constrain/ahead.h"
#include "constrain/automaton.h"
#include "constrain/foresee.h"
#include "constrain/grammar.h"
#include "constrain/json.h"
#include "constrain/mask.h"
#include "constrain/regex.h"
#include "constrain/rules.h"
#include "constrain/schema.h"
#include "constrain/unicode.h"

/* The state of one answer, which is kept when everything else is forgotten. */
struct kept {
    uint64_t generation; /* `generation` of the answer's struct constrain_at; 0 = free */
    uint32_t state;
    uint32_t now; /* the state's number in the automaton's present generation */
};

struct constrain {
    pthread_mutex_t lock; /* guards everything below */
    struct automaton automaton;
    struct mask_maker maker;
    struct constrain_budget *budget;
    size_t charged; /* bytes that are charged to `budget` */
    bool forgets;   /* everything learned must be forgotten before the next use */
    bool shrinks;   /* `forgets` is set, and the memory is to be freed, too */
    struct kept kept[CONSTRAIN_KEPT_MAX]; /* a ring */
    int next_kept;
};

/* ---- Parts ---- */

struct building {
    struct node_pool pool;
    struct json_nodes json;
    struct json_nodes noted; /* parts with a notation use these; no pool: there was none yet */
    struct fault *fault;
    int rc;                            /* the first error; it stays */
    const struct constrain_part *last; /* the last part begun that has a field; NULL: none */
};

static const char *field_of(const struct constrain_part *part) {
    return part->field != NULL ? part->field : "";
}

static uint32_t constrain_fail(struct building *b, int rc, const struct constrain_part *part,
                               const char *text) {
    if (b->rc == 0 && b->pool.rc == 0) b->rc = fault_set(b->fault, rc, field_of(part), "%s", text);
    return NODE_NONE;
}

/* The readers of regular expressions and grammars do not know the field, so it is set here. */
static uint32_t constrain_text_part(struct building *b, const struct constrain_part *part) {
    struct fault fault = {0};
    uint32_t node = NODE_NONE;
    int rc = part->kind == CONSTRAIN_REGEX
                 ? regex_compile(&b->pool, part->text, part->size, REGEX_WHOLE, &node, &fault)
                 : grammar_compile(&b->pool, part->text, part->size, &node, &fault);
    if (rc != 0) return constrain_fail(b, rc, part, fault.code != 0 ? fault.text : err_text(rc));
    if (node == NODE_NONE) return constrain_fail(b, ERR_INVALID, part, "no text matches it");
    return node;
}

/* Returns the expressions in the notation of a part. */
static struct json_nodes *nodes_of(struct building *b, const struct constrain_part *part) {
    if (part->notation == NULL) return &b->json;
    if (b->noted.pool == NULL) json_nodes_open(&b->noted, &b->pool, true, part->notation);
    CHECK(b->noted.notation == part->notation);
    return &b->noted;
}

static uint32_t schema_part(struct building *b, const struct constrain_part *part) {
    uint32_t node = NODE_NONE;
    const struct schema_options options = {.only_objects = part->only_objects,
                                           .closed = part->closed,
                                           .form = part->tags       ? SCHEMA_TAGGED
                                                   : part->notation ? SCHEMA_ARGUMENTS
                                                                    : SCHEMA_JSON,
                                           .tags = part->tags,
                                           .field = field_of(part)};
    int rc = schema_compile(nodes_of(b, part), part->schema, &options, &node, b->fault);
    if (rc != 0 && b->pool.rc == 0) b->rc = rc;
    if (rc == 0 && node == NODE_NONE)
        return constrain_fail(b, ERR_INVALID, part, "no value satisfies the schema");
    return node;
}

/* Builds the texts without a word: not (anything, the word, anything). */
static uint32_t without_part(struct building *b, const struct constrain_part *part) {
    struct node_pool *pool = &b->pool;
    uint32_t any = b->json.any_text, word = node_text(pool, part->text, part->size);
    uint32_t with = node_seq3(pool, any, word, any);
    return node_live(pool, node_and2(pool, any, node_not(pool, with)));
}

static uint32_t part_node(struct building *b, const struct constrain_part *part) {
    uint32_t node = NODE_EMPTY, list;
    if (b->rc != 0 || b->pool.rc != 0) return NODE_NONE;
    if (part->field != NULL) b->last = part;
    switch (part->kind) {
    case CONSTRAIN_TEXT:
        return node_text(&b->pool, part->text, part->size);
    case CONSTRAIN_REGEX:
    case CONSTRAIN_GRAMMAR:
        return constrain_text_part(b, part);
    case CONSTRAIN_SCHEMA:
        return schema_part(b, part);
    case CONSTRAIN_OBJECT:
        return part->notation ? nodes_of(b, part)->arguments : b->json.object;
    case CONSTRAIN_WITHOUT:
        return without_part(b, part);
    case CONSTRAIN_SEQ:
        for (int i = part->count; i-- > 0;)
            node = node_seq(&b->pool, part_node(b, &part->children[i]), node);
        return node;
    case CONSTRAIN_ALT:
        list = node_list_open(&b->pool);
        for (int i = 0; i < part->count; i++)
            node_list_add(&b->pool, part_node(b, &part->children[i]));
        return node_list_alt(&b->pool, list);
    case CONSTRAIN_REPEAT:
        CHECK(part->count == 1 && part->min >= 0);
        return node_repeat(&b->pool, part_node(b, part->children), (uint32_t)part->min,
                           part->max < 0 ? NODE_ENDLESS : (uint32_t)part->max);
    }
    CHECK_MSG(false, "a part of kind %d", (int)part->kind);
}

/* Turns an error of the pool into a fault. It names the field of the last part that was begun or,
 * before any, that of the whole language. */
static int refuse_pool(const struct building *b, const struct constrain_part *part, int rc) {
    const char *field = field_of(b->last != NULL ? b->last : part);
    if (rc != ERR_LIMIT) return fault_set(b->fault, rc, field, "%s", err_text(rc));
    return fault_set(b->fault, rc, field,
                     "is too complex: it needs more than %d expressions, or more work than a text "
                     "of its length may cost; use fewer alternatives, counts and lengths",
                     CONSTRAIN_NODES_MAX);
}

static int constrain_finish(struct building *b, const struct constrain_part *part, int rc) {
    if (rc == 0) rc = b->rc;
    return b->pool.rc != 0 ? refuse_pool(b, part, b->pool.rc) : rc;
}

static int constrain_build(struct building *b, const struct constrain_part *part, uint32_t *root) {
    uint32_t rule = 0;
    json_nodes_open(&b->json, &b->pool, part->one_spacing, NULL);
    *root = part_node(b, part);
    int rc = b->rc != 0 ? b->rc : rules_prepare(&b->pool, *root, root, &rule);
    if (rc == ERR_UNSUPPORTED && b->rc == 0)
        constrain_fail(
            b, rc, part,
            "a rule that begins with itself by way of other rules (left recursion) is not "
            "supported");
    if (rc == 0 && b->pool.rc == 0 && *root == NODE_NONE)
        rc = (constrain_fail(b, ERR_INVALID, part, "no text satisfies it"), ERR_INVALID);
    return constrain_finish(b, part, rc);
}

/* ---- Opening ---- */

/* Frees the memory that only the compilation needed, and prepares the memory that the first masks
 * will need. */
static int constrain_prepare(struct constrain *c) {
    automaton_shrink(&c->automaton);
    automaton_prepare(&c->automaton);
    if (c->automaton.pool.rc != 0) return c->automaton.pool.rc;
    int rc = mask_maker_prepare(&c->maker);
    if (rc == 0) ahead_learn(&c->automaton, &c->maker, CONSTRAIN_AHEAD_WORK);
    return rc;
}

static int open_language(struct constrain *c, struct building *b, uint32_t root,
                         const struct constrain_tokens *tokens) {
    int rc = automaton_open(&c->automaton, &b->pool, root);
    if (rc == 0) rc = mask_maker_open(&c->maker, tokens);
    if (rc == 0) rc = constrain_prepare(c);
    if (rc == 0 && pthread_mutex_init(&c->lock, NULL) != 0) rc = ERR_NOMEM;
    if (rc == 0) return 0;
    mask_maker_close(&c->maker);
    automaton_close(&c->automaton);
    return rc;
}

/* Charges `bytes` to the budget in place of what the language was charged before. */
static bool charge(struct constrain *c, size_t bytes) {
    if (c->budget == NULL) return true;
    size_t used = atomic_fetch_add(&c->budget->used, bytes - c->charged) + bytes - c->charged;
    bool more = bytes > c->charged;
    c->charged = bytes;
    return !more || used <= c->budget->limit;
}

static size_t constrain_size_of(const struct constrain *c) {
    return sizeof *c + automaton_bytes(&c->automaton) + mask_maker_bytes(&c->maker);
}

static uint64_t bytes_of_tree(const cJSON *node) {
    const cJSON *child;
    uint64_t bytes = 1;
    if (node->string != NULL) bytes += strlen(node->string);
    if (node->valuestring != NULL) bytes += strlen(node->valuestring);
    cJSON_ArrayForEach(child, node) bytes += bytes_of_tree(child);
    return bytes;
}

/* Returns about how many bytes a client wrote for the part. */
static uint64_t bytes_of(const struct constrain_part *part) {
    uint64_t bytes = part->size;
    if (part->schema != NULL) bytes += bytes_of_tree(part->schema);
    for (int i = 0; i < part->count; i++) bytes += bytes_of(&part->children[i]);
    return bytes;
}

static uint64_t work_for(const struct constrain_part *part) {
    uint64_t work = CONSTRAIN_WORK_LEAST + bytes_of(part) * CONSTRAIN_WORK_PER_BYTE;
    return work < CONSTRAIN_WORK_MAX ? work : CONSTRAIN_WORK_MAX;
}

/* Compiles into *c. */
static int constrain_compile(struct constrain *c, const struct constrain_part *part,
                             const struct constrain_tokens *tokens, struct fault *fault) {
    struct building b = {.fault = fault};
    uint32_t root;
    if (!node_pool_open(&b.pool, CONSTRAIN_NODES_MAX))
        return fault_set(fault, ERR_NOMEM, field_of(part), "%s", err_text(ERR_NOMEM));
    b.pool.work_limit = work_for(part);
    int rc = constrain_build(&b, part, &root);
    if (rc == 0) {
        rc = open_language(c, &b, root, tokens);
        if (rc != 0) rc = refuse_pool(&b, part, rc);
    }
    json_nodes_close(&b.json);
    json_nodes_close(&b.noted);
    node_pool_close(&b.pool);
    return rc;
}

int constrain_open(const struct constrain_part *part, const struct constrain_tokens *tokens,
                   struct constrain_budget *budget, struct constrain **out, struct fault *fault) {
    *out = NULL;
    struct constrain *c = mem_try_alloc(1, sizeof *c);
    if (c == NULL) return fault_set(fault, ERR_NOMEM, field_of(part), "%s", err_text(ERR_NOMEM));
    c->budget = budget;
    int rc =
        charge(c, CONSTRAIN_COMPILE_BYTES) ? constrain_compile(c, part, tokens, fault) : ERR_FULL;
    if (rc == 0) {
        (void)charge(c, constrain_size_of(c));
        *out = c;
        return 0;
    }
    if (rc == ERR_FULL)
        fault_set(fault, rc, field_of(part),
                  "the schemas, expressions and grammars of all requests need more than %zu MiB",
                  budget->limit >> 20);
    (void)charge(c, 0);
    mem_free(c);
    return rc;
}

void constrain_close(struct constrain *c) {
    if (c == NULL) return;
    (void)charge(c, 0);
    pthread_mutex_destroy(&c->lock);
    mask_maker_close(&c->maker);
    automaton_close(&c->automaton);
    mem_free(c);
}

/* ---- Answers ---- */

static struct kept *find_kept(struct constrain *c, const struct constrain_at *at) {
    for (int i = 0; i < CONSTRAIN_KEPT_MAX; i++)
        if (c->kept[i].generation == at->generation && c->kept[i].state == at->state)
            return &c->kept[i];
    return NULL;
}

/* Moves an answer on from `at` to `to`, whose state is of the present generation, and records the
 * new state in the ring. */
static void constrain_go_on(struct constrain *c, struct constrain_at *at,
                            const struct constrain_at *to) {
    struct kept *kept = at->generation != 0 ? find_kept(c, at) : NULL;
    if (kept == NULL) {
        kept = &c->kept[c->next_kept];
        c->next_kept = (c->next_kept + 1) % CONSTRAIN_KEPT_MAX;
    }
    *kept = (struct kept){to->generation, to->state, to->state};
    *at = *to;
}

/* Forgets all states but that of the answer that asks and, with `others`, those in the ring. */
static void constrain_keep(struct constrain *c, struct constrain_at *at, bool others) {
    uint32_t states[CONSTRAIN_KEPT_MAX + 1];
    struct kept *owners[CONSTRAIN_KEPT_MAX];
    bool mine = at->generation == c->automaton.generation && at->state > AUTOMATON_DEAD;
    int count = 0;
    for (int i = 0; i < CONSTRAIN_KEPT_MAX; i++) {
        if (!others) c->kept[i] = (struct kept){0};
        if (c->kept[i].generation == 0) continue;
        owners[count] = &c->kept[i];
        states[count++] = c->kept[i].now;
    }
    if (mine) states[count] = at->state;
    automaton_keep(&c->automaton, states, count + mine);
    for (int i = 0; i < count; i++) {
        owners[i]->now = states[i];
        if (states[i] == 0) *owners[i] = (struct kept){0};
    }
    if (!mine || states[count] == 0) return;
    at->generation = c->automaton.generation;
    at->state = states[count];
}

static void constrain_forget(struct constrain *c, struct constrain_at *at) {
    constrain_keep(c, at, true);
    if (automaton_is_full(&c->automaton)) constrain_keep(c, at, false);
    mask_maker_forget(&c->maker);
    if (c->shrinks) {
        automaton_shrink(&c->automaton);
        mask_maker_shrink(&c->maker);
    }
    c->forgets = c->shrinks = false;
}

/* Finds the answer's state in the present generation, or reads its text again from the beginning.
 */
static void constrain_find(struct constrain *c, struct constrain_at *at) {
    struct automaton *a = &c->automaton;
    if (at->generation == a->generation) return;
    struct kept *kept = at->generation != 0 ? find_kept(c, at) : NULL;
    at->generation = a->generation;
    at->state = kept != NULL ? kept->now : automaton_start(a);
    if (kept == NULL) at->read = 0;
}

/* Reads the text up to `end`. On ERR_INVALID or an error of the pool, `at` is where it occurred. */
static int read_on(struct automaton *a, struct constrain_at *at, const char *text, size_t end) {
    while (a->pool.rc == 0 && at->read < end && at->state > AUTOMATON_DEAD) {
        uint32_t state = automaton_move(a, at->state, (unsigned char)text[at->read]);
        if (a->pool.rc != 0) break;
        at->state = state;
        at->read++;
    }
    if (a->pool.rc != 0) return a->pool.rc;
    return at->state == AUTOMATON_DEAD ? ERR_INVALID : 0;
}

static bool continues(struct automaton *a, uint32_t state) {
    for (int class = 0; class < a->pool.classes; class ++)
        if (automaton_move(a, state, a->pool.example[class]) != AUTOMATON_DEAD) return true;
    return false;
}

struct question {
    const char *text;
    size_t size;
    uint32_t *mask;
    struct constrain_next *next;
};

/* Reads on from `to` and answers the question. Text that is read again after its state was
 * forgotten stays read, even if a later part fails: `at` follows. */
static int look_on(struct constrain *c, struct constrain_at *at, struct constrain_at *to,
                   const struct question *q) {
    struct automaton *a = &c->automaton;
    size_t known = q->size < to->reached ? q->size : to->reached;
    constrain_find(c, to);
    bool again = to->read < known;
    int rc = read_on(a, to, q->text, known);
    if (again && to->state > AUTOMATON_DEAD) {
        if (to->read > to->again) to->again = to->read;
        constrain_go_on(c, at, to);
    }
    if (rc == 0) rc = read_on(a, to, q->text, q->size);
    if (rc != 0 || q->next == NULL) return rc;
    q->next->accepts = a->states[to->state].accepts;
    q->next->continues = continues(a, to->state);
    if (q->mask != NULL && a->pool.rc == 0) (void)mask_make(&c->maker, a, to->state, q->mask);
    return a->pool.rc;
}

/* Answers the question. When a limit on what is learned is reached, forgets everything but the
 * answer's place and tries again, as long as each try reads more of the text. ERR_BUSY: the work is
 * spent. `at` is as before, unless the result is 0 or part of the text was read again. */
static int look_often(struct constrain *c, struct constrain_at *at, const struct question *q,
                      const struct constrain_effort *effort) {
    struct automaton *a = &c->automaton;
    struct constrain_at to = *at;
    bool first = true;
    for (;;) {
        if (c->forgets && !effort->may_wait) return ERR_BUSY;
        if (c->forgets) constrain_forget(c, &to);
        size_t before = to.read;
        int rc = look_on(c, at, &to, q);
        if (rc == 0) {
            to.reached = to.read;
            constrain_go_on(c, at, &to);
        }
        if (a->pool.rc == 0) return rc;
        if (node_pool_resume(&a->pool)) return ERR_BUSY;
        c->forgets = true;
        if (!first && to.read <= before) return rc;
        first = false;
    }
}

/* Adds up the work of calls that ended without a result. Work that read on in a forgotten text does
 * not count. When the sum reaches its limit, everything learned is forgotten, because one text
 * needs more than the limits allow. */
static int count_work(struct constrain *c, struct constrain_at *at, bool led_on, uint64_t work,
                      int rc) {
    if (rc != ERR_BUSY) at->again = 0;
    if (rc != ERR_BUSY || led_on) {
        at->work = 0;
        return rc;
    }
    at->work += (uint32_t)work;
    if (at->work < CONSTRAIN_MASK_WORK_MAX) return ERR_BUSY;
    c->forgets = true;
    return ERR_LIMIT;
}

static void charge_all(struct constrain *c, struct constrain_at *at, bool may_wait) {
    if (charge(c, constrain_size_of(c))) return;
    c->forgets = c->shrinks = true;
    if (!may_wait) return;
    constrain_forget(c, at);
    (void)charge(c, constrain_size_of(c));
}

static int constrain_look(struct constrain *c, struct constrain_at *at, const struct question *q,
                          struct constrain_effort *effort) {
    struct node_pool *pool = &c->automaton.pool;
    uint64_t most = effort->work;
    size_t again = at->again;
    effort->work = 0;
    if (effort->may_wait)
        pthread_mutex_lock(&c->lock);
    else if (pthread_mutex_trylock(&c->lock) != 0)
        return ERR_BUSY;
    uint64_t begin = pool->work;
    pool->work_limit = begin + most;
    int rc = look_often(c, at, q, effort);
    effort->work = pool->work - begin;
    rc = count_work(c, at, at->again > again, effort->work, rc);
    charge_all(c, at, effort->may_wait);
    pthread_mutex_unlock(&c->lock);
    return rc;
}

int constrain_next_within(struct constrain *c, struct constrain_at *at, const char *text,
                          size_t size, uint32_t *mask, struct constrain_next *next,
                          struct constrain_effort *effort) {
    return constrain_look(c, at, &(struct question){text, size, mask, next}, effort);
}

int constrain_next(struct constrain *c, struct constrain_at *at, const char *text, size_t size,
                   uint32_t *mask, struct constrain_next *next) {
    int rc = ERR_BUSY;
    while (rc == ERR_BUSY) {
        struct constrain_effort effort = {CONSTRAIN_MASK_WORK_MAX, true};
        rc = constrain_look(c, at, &(struct question){text, size, mask, next}, &effort);
    }
    return rc;
}

int constrain_read(struct constrain *c, struct constrain_at *at, const char *text, size_t size) {
    return constrain_next(c, at, text, size, NULL, NULL);
}

size_t constrain_foresee(struct constrain *c, const struct constrain_at *at, const char *text,
                         size_t size, char *out, size_t most, struct constrain_effort *effort) {
    struct automaton *a = &c->automaton;
    uint64_t limit = effort->work;
    size_t found = 0;
    effort->work = 0;
    if (pthread_mutex_trylock(&c->lock) != 0) return 0;
    uint64_t begin = a->pool.work;
    a->pool.work_limit = begin + limit;
    if (!c->forgets && at->generation == a->generation && at->read == size)
        found = foresee_write(a, at->state, text, size, out, most);
    if (a->pool.rc != 0) {
        found = 0; /* the found bytes may stop inside a word, whose tokens differ from those of the
                      whole word */
        if (!node_pool_resume(&a->pool)) c->forgets = true;
    }
    effort->work = a->pool.work - begin + found;
    if (!charge(c, constrain_size_of(c))) c->forgets = c->shrinks = true;
    pthread_mutex_unlock(&c->lock);
    return found;
}
