/* Classes of entries (`ems`) on the device: what they promise beyond agreeing with the CPU, which
 * emu_policy.c plays, and what the check of the cache finds wrong with them. */
#include <criterion/criterion.h>

#include "play.h"

/* Members of a slot, all streams, from its blocks. */
static int count_members(struct pair *p, struct kern *kern, int slot) {
    int count = 0;
    for (int stream = 0; stream < streams_of(p); stream++) {
        size_t size;
        int32_t length, members = 0;
        char *bytes = block_of(kern, slot, 1 + stream, &size);
        memcpy(&length, bytes, sizeof length);
        size_t end = 4 + (size_t)length * (12 + 4 * (size_t)p->options.head_dim);
        if (size > end) memcpy(&members, bytes + end, sizeof members);
        count += members;
        free(bytes);
    }
    return count;
}

/* Slot 1 has classes and sees 40 tokens more: alone at once, or in pieces beside slot 2, which has
 * classes of its own; then it evicts again. Its answers of those tokens, the caller's. */
static float *play_classes(struct pair *p, const struct kern_rule *rule, bool alone) {
    static const int pieces[] = {40, 0, 7, 1, 31, 1};
    struct kern *kern = p->kern[EMULATED];
    size_t row = (size_t)(p->options.heads_q * p->options.head_dim);
    size_t layers = (size_t)p->options.layers;
    float *answers = malloc(layers * 40 * row * sizeof *answers);
    struct kern_evict due[] = {{.slot = 2, .tokens = 50, .budget = 24, .rule = rule},
                               {.slot = 1, .tokens = 60, .budget = 24, .rule = rule}};
    emu_set_seed(alone ? 3 : 8);
    for (int slot = 1; slot < 3; slot++) {
        struct kern_span span = {.slot = slot, .count = slot == 1 ? 60 : 50, .rule = rule};
        struct kern_batch batch = {.spans = &span, .span_count = 1, .rows = span.count};
        free(run_step(p, kern, &batch));
    }
    MUST(kern->ops->evict(kern, due, 2));
    for (int i = alone ? 0 : 2, done = 0, other = 50; done < 40; i++) {
        int beside = alone ? 0 : 1 + i % 2 * 4;
        struct kern_span spans[] = {
            {.slot = 2, .count = beside, .pos = other, .rule = rule},
            {.slot = 1, .row = beside, .count = pieces[i], .pos = 60 + done, .rule = rule}};
        struct kern_batch batch = {
            .spans = spans + alone, .span_count = 2 - alone, .rows = beside + pieces[i]};
        float *out = run_step(p, kern, &batch);
        for (size_t layer = 0; layer < layers; layer++)
            memcpy(answers + (layer * 40 + (size_t)done) * row,
                   out + (layer * (size_t)batch.rows + (size_t)beside) * row,
                   (size_t)pieces[i] * row * sizeof *out);
        free(out);
        done += pieces[i];
        other += beside;
    }
    due[1].tokens = 100;
    due[0].tokens = alone ? 50 : 62;
    MUST(kern->ops->evict(kern, due, 2));
    return answers;
}

/* Bitwise the same answers and the same state, in pieces and in company. */
Test(emu_classes, classes_depend_on_their_sequence_alone) {
    struct method method = {"ems", loose};
    struct kern_rule rule = rule_of(&method, 24);
    char *bytes[2];
    float *answers[2];
    size_t size[2], count = 0;
    for (int k = 0; k < 2; k++) {
        struct pair p = open_pair(shapes[0], 4096, 7);
        for (int slot = 1; slot < 3; slot++) turn_slot(&p, slot, &rule);
        answers[k] = play_classes(&p, &rule, k == 0);
        bytes[k] = bytes_of(&p, p.kern[EMULATED], 1, &size[k]);
        count = (size_t)(p.options.layers * 40 * p.options.heads_q * p.options.head_dim);
        cr_assert_gt(count_members(&p, p.kern[EMULATED], 1), 10);
        both_close(p.kern);
    }
    cr_assert(memcmp(answers[0], answers[1], count * sizeof **answers) == 0);
    cr_assert(size[0] == size[1] && memcmp(bytes[0], bytes[1], size[0]) == 0);
    for (int k = 0; k < 2; k++) {
        free(bytes[k]);
        free(answers[k]);
    }
}

/* Dropping tokens drops members of other classes, too; a fork that shares their pages keeps its
 * own. What is left goes on. */
Test(emu_classes, classes_lose_dropped_tokens) {
    struct method method = {"ems", loose};
    struct kern_rule rule = rule_of(&method, 24);
    struct pair p = open_pair(shapes[0], 8192, 15);
    play_one(&p, 1, &rule, 24, (const int[]){60, 30}, 2, "dropped");
    turn_slot(&p, 0, &rule);
    int before = count_members(&p, p.kern[EMULATED], 1);
    for (int b = 0; b < BACKENDS; b++) {
        MUST(p.kern[b]->ops->fork(p.kern[b], 1, 0));
        MUST(p.kern[b]->ops->truncate(p.kern[b], 1, 40));
    }
    int after = count_members(&p, p.kern[EMULATED], 1);
    cr_assert(after > 0 && after < before, "%d of %d", after, before);
    cr_assert_eq(count_members(&p, p.kern[EMULATED], 0), before);
    for (int slot = 0; slot < 2; slot++) {
        struct kern_span span = {
            .slot = slot, .count = 9, .pos = slot == 1 ? 40 : 90, .rule = &rule};
        struct kern_evict due = {.slot = slot, .tokens = span.pos + 9, .budget = 24, .rule = &rule};
        expect_same_held(p.kern, slot, streams_of(&p), "dropped");
        feed(&p, &span, 1, "dropped");
        evict(&p, &due, 1, "dropped");
    }
    for (int b = 0; b < BACKENDS; b++)
        for (int slot = 0; slot < 2; slot++) {
            struct kern_cache_stats stats;
            p.kern[b]->ops->release(p.kern[b], slot);
            p.kern[b]->ops->cache_stats(p.kern[b], &stats);
            cr_assert(slot == 0 || stats.pages_used == 0, "%s", p.kern[b]->ops->name);
        }
    both_close(p.kern);
}

/* Members that come with a snapshot are forgotten by a rule without classes, and their pages go. */
Test(emu_classes, classes_under_another_rule) {
    struct method method = {"ems", loose}, other = {"h2o", as_it_is};
    struct kern_rule rule = rule_of(&method, 24), plain = rule_of(&other, 24);
    struct pair p = open_pair(shapes[0], 8192, 16);
    struct kern_block blocks[8] = {0};
    int count = 1 + streams_of(&p);
    play_one(&p, 1, &rule, 24, (const int[]){60}, 1, "another");
    for (int k = 0; k < count; k++)
        blocks[k].data = block_of(p.kern[EMULATED], 1, k, &blocks[k].size);
    for (int b = 0; b < BACKENDS; b++)
        for (int k = 0; k < count; k++)
            MUST(p.kern[b]->ops->snapshot_import(p.kern[b], 3, k, &blocks[k]));
    expect_same_held(p.kern, 3, streams_of(&p), "another");
    cr_assert_gt(count_members(&p, p.kern[EMULATED], 3), 0);
    struct kern_span span = {.slot = 3, .count = 2, .pos = 60, .rule = &plain};
    feed(&p, &span, 1, "another");
    expect_same_held(p.kern, 3, streams_of(&p), "another");
    cr_assert_eq(count_members(&p, p.kern[EMULATED], 3), 0);
    for (int k = 0; k < count; k++) free((void *)(uintptr_t)blocks[k].data);
    both_close(p.kern);
}

/* More members than a page holds: rows grow, are copied and cut across pages. */
Test(emu_classes, classes_of_several_pages) {
    const struct kern_cache_options shape = {
        .layers = 1, .heads_q = 1, .heads_kv = 1, .head_dim = 64};
    struct method method = {"ems", loose};
    struct kern_rule rule = rule_of(&method, 48);
    struct pair p = open_pair(shape, 4096, 21);
    struct kern_span span = {.slot = 0, .count = 9, .pos = 780, .rule = &rule};
    struct kern_evict due = {.slot = 0, .tokens = 789, .budget = 48, .rule = &rule};
    rule.classes.gamma = 16;
    rule.classes.tau = 0;
    play_one(&p, 1, &rule, 48, (const int[]){130, 130, 130, 130, 130, 130}, 6, "pages");
    cr_assert_gt(count_members(&p, p.kern[EMULATED], 1), 690);
    turn_slot(&p, 0, &rule);
    for (int b = 0; b < BACKENDS; b++) MUST(p.kern[b]->ops->fork(p.kern[b], 1, 0));
    feed(&p, &span, 1, "pages");
    evict(&p, &due, 1, "pages");
    for (int b = 0; b < BACKENDS; b++) MUST(p.kern[b]->ops->truncate(p.kern[b], 1, 500));
    cr_assert_lt(count_members(&p, p.kern[EMULATED], 1), 500);
    for (int slot = 0; slot < 2; slot++) expect_same_held(p.kern, slot, 1, "pages");
    expect_same_entries(&p, 1, true, "pages");
    both_close(p.kern);
}

/* ---- The check of the cache ---- */

/* The members of a stream's block, `count` of them, 12 bytes each: centre, position, gain. */
static char *members_in(const struct pair *p, const struct kern_block *block, int32_t *count) {
    int32_t length;
    char *bytes = (char *)(uintptr_t)block->data;
    memcpy(&length, bytes, sizeof length);
    char *at = bytes + 4 + (size_t)length * (12 + 4 * (size_t)p->options.head_dim);
    *count = 0;
    if ((size_t)(at - bytes) < block->size) memcpy(count, at, sizeof *count);
    return at + 4;
}

static int32_t number_at(const char *members, int member, int which) {
    int32_t x;
    memcpy(&x, members + 12 * member + 4 * which, sizeof x);
    return x;
}

/* A member that begins a class and may have the position of the one before it: members ascend
 * nevertheless. */
static int find_heir(const char *members, int count) {
    for (int i = 1; i < count; i++) {
        int32_t centre = number_at(members, i, 0), before = number_at(members, i - 1, 1);
        bool last = i + 1 == count || number_at(members, i + 1, 0) != centre;
        if (number_at(members, i - 1, 0) != centre &&
            (last || before < number_at(members, i + 1, 1)))
            return i;
    }
    return -1;
}

/* Result of the check when the first stream with an heir has a wrong `pos` there: 0 its own, 1 that
 * of another class's member, 2 that of an entry. The blocks are imported without validation. */
static int check_broken(struct pair *p, struct kern_block *blocks, int how) {
    struct fault fault = {0};
    struct kern *kern = p->kern[EMULATED];
    int heir = -1;
    for (int k = 0; k <= streams_of(p); k++) {
        int32_t count = 0, kept = 0;
        char *members = k > 0 && heir < 0 ? members_in(p, &blocks[k], &count) : NULL;
        if (count > 0) heir = find_heir(members, count);
        bool breaks = count > 0 && heir >= 0;
        if (breaks) {
            int32_t pos = number_at(members, heir - (how == 1), how == 2 ? 0 : 1);
            kept = number_at(members, heir, 1);
            memcpy(members + 12 * heir + 4, &pos, sizeof pos);
        }
        MUST(kern->ops->snapshot_import(kern, 3, k, &blocks[k]));
        if (breaks) memcpy(members + 12 * heir + 4, &kept, sizeof kept);
    }
    cr_assert(heir >= 0);
    int rc = kern->ops->cache_check(kern, &fault);
    cr_assert(!rc || strstr(fault.text, "in the class of"), "%s", fault.text);
    kern->ops->release(kern, 3);
    return rc;
}

/* A position is one token's: of an entry, or of a member of one class. */
Test(emu_classes, a_position_held_twice_is_found) {
    struct method method = {"ems", loose};
    struct kern_rule rule = rule_of(&method, 24);
    struct pair p = open_pair(shapes[0], 8192, 31);
    struct kern_block blocks[8] = {0};
    int count = 1 + streams_of(&p);
    play_one(&p, 1, &rule, 24, (const int[]){60, 30}, 2, "twice");
    for (int k = 0; k < count; k++)
        blocks[k].data = block_of(p.kern[EMULATED], 1, k, &blocks[k].size);
    cr_assert_eq(check_broken(&p, blocks, 0), 0);
    cr_assert_eq(check_broken(&p, blocks, 1), ERR_INTERNAL);
    cr_assert_eq(check_broken(&p, blocks, 2), ERR_INTERNAL);
    cr_assert_eq(check_broken(&p, blocks, 0), 0);
    for (int k = 0; k < count; k++) free((void *)(uintptr_t)blocks[k].data);
    both_close(p.kern);
}
