/* Pictures in prompts: engine/steps/sched_pictures.c. The world's encoder makes tokens of tiles, so
 * a prompt with pictures has the answer of the prompt with these tokens. */
#include <criterion/criterion.h>
#include <string.h>

#include "base/mem.h"
#include "engine/engine_pictures.h"
#include "tests/unit/engine/requests.h"

enum { PROMPT = 90, ANSWER = 20, TILES = 3, PICTURES = 8 };

static struct picture pictures[PICTURES];

/* A request with `count` pictures, and the same with tokens in their places. */
struct asked {
    struct engine_job job, plain;
    const struct picture *shown[4];
    struct picture_rows rows[4 * TILES];
    int32_t prompt[PROMPT], tokens[PROMPT];
};

/* Tiles of pictures with even numbers are smaller. */
static int rows_of(int picture) {
    return picture % 2 ? WORLD_TILE : WORLD_TILE - 2;
}

static int32_t id_of(int picture, int tile, int row) {
    const struct engine_grid grid = {2, rows_of(picture) / 2};
    return engine_picture_id(grid, row, (uint32_t)world_picture_row(picture, tile, row));
}

/* The pictures stand behind 7 tokens each, their tiles behind one each. */
static void make(struct asked *asked, int number, int count, const int *which,
                 struct engine_kv kv) {
    asked->job = job_of(number, PROMPT, ANSWER, kv);
    struct engine_request *request = &asked->job.request;
    memcpy(asked->prompt, request->prompt, sizeof asked->prompt);
    memcpy(asked->tokens, request->prompt, sizeof asked->tokens);
    size_t at = 0;
    int all = 0;
    for (int i = 0; i < count; i++) {
        pictures[which[i]] = (struct picture){
            .tiles = TILES, .tile_tokens = rows_of(which[i]), .digest = {(uint8_t)which[i]}};
        asked->shown[i] = &pictures[which[i]];
        at += 7;
        for (int tile = 0; tile < TILES; tile++, at += (size_t)rows_of(which[i]) + 1) {
            asked->rows[all++] = (struct picture_rows){
                .at = at, .count = rows_of(which[i]), .picture = i, .tile = tile};
            for (int k = 0; k < rows_of(which[i]); k++) {
                asked->prompt[at + (size_t)k] = id_of(which[i], tile, k);
                asked->tokens[at + (size_t)k] = world_picture_row(which[i], tile, k);
            }
        }
    }
    cr_assert_leq(at, PROMPT);
    request->prompt = asked->prompt;
    request->pictures = asked->shown;
    request->picture_count = count;
    request->picture_rows = asked->rows;
    request->picture_row_count = all;
    asked->plain = job_of(number, PROMPT, ANSWER, kv);
    asked->plain.request.prompt = asked->tokens;
}

static void close_both(struct asked *asked) {
    engine_job_close(&asked->job);
    engine_job_close(&asked->plain);
}

static struct world_options options_of(int tiles, int rows) {
    return (struct world_options){
        .pages = 1600, .sequences = 4, .conversations = 8, .rows = rows, .tiles = tiles};
}

/* No world is open: each has the whole plan of failures. */
static void expect_answer(struct asked *asked) {
    run_alone(&asked->plain);
    expect_same_answer(&asked->plain, &asked->job);
}

/* Steps of many and of few rows, tiles that are all kept and that push each other out, alone and
 * beside others, with evictions in the middle of pictures. */
Test(pictures, answers_are_those_of_the_tokens_that_they_stand_for) {
    const struct engine_kv kinds[] = {full(), global(24, 8, 16), global(12, 4, 8)};
    for (int i = 0; i < 12; i++) {
        struct asked asked[3];
        struct world_options options = options_of(i % 2 ? 2 : 32, i % 4 < 2 ? 6 : 64);
        struct world w;
        options.drafts = i % 3 ? DRAFT_MAX : 0;
        options.logits = i % 4 < 2 ? 6 : 24;
        world_open(&w, &options);
        for (int k = 0; k < 3; k++) {
            make(&asked[k], 1 + k, 3, (int[]){k, 3, k + 1}, kinds[i % 3]);
            asked[k].job.request.drafts = options.drafts ? -1 : 0;
            submit(&w, &asked[k].job);
        }
        run_until_idle(&w);
        if (options.tiles == 32) cr_assert_eq(w.sched.counters.encoded_tiles, 4 * TILES);
        world_close(&w);
        for (int k = 0; k < 3; k++) expect_answer(&asked[k]);
        for (int k = 0; k < 3; k++) close_both(&asked[k]);
    }
}

/* A prompt that is read more slowly than its tiles are encoded. */
Test(pictures, no_tile_takes_the_place_of_one_that_is_read_before_it) {
    for (int tiles = 2; tiles < 6; tiles++) {
        struct asked asked;
        struct world_options options = options_of(tiles, 2);
        struct world w;
        options.sequences = 1;
        options.logits = 2;
        world_open(&w, &options);
        make(&asked, 1, 3, (int[]){1, 3, 5}, full());
        submit(&w, &asked.job);
        run_until_idle(&w);
        cr_expect_eq(w.sched.counters.encoded_tiles, 3 * TILES, "%d",
                     (int)w.sched.counters.encoded_tiles);
        world_close(&w);
        close_both(&asked);
    }
}

/* ---- Rows that see each other ---- */

static void make_together(struct asked *asked, int number, struct engine_kv kv) {
    make(asked, number, 3, (int[]){number, 3, number + 1}, kv);
    for (int i = 0; i < 3; i++) pictures[asked->shown[i] - pictures].together = true;
}

/* In steps of any length: with few rows beside other answers, with many, and with chunks of fewer
 * rows than a tile, so that evictions come due inside tiles. */
Test(pictures, rows_that_see_each_other_are_read_in_one_step) {
    const struct engine_kv kinds[] = {full(), global(24, 8, 16), global(12, 4, 3), global(9, 0, 7)};
    for (int i = 0; i < 8; i++) {
        struct asked asked[3], alone[3];
        struct world_options options = options_of(i % 3 ? 32 : 4, i < 4 ? WORLD_TILE + 3 : 64);
        struct world w;
        for (int k = 0; k < 3; k++) {
            options.sequences = 1;
            options.rows = 100;
            world_open(&w, &options);
            make_together(&alone[k], 1 + k, kinds[i % 4]);
            submit(&w, &alone[k].job);
            run_until_idle(&w);
            world_close(&w);
        }
        options.sequences = 4;
        options.rows = i < 4 ? WORLD_TILE + 3 : 64;
        options.logits = 6;
        options.drafts = i % 3 ? DRAFT_MAX : 0;
        world_open(&w, &options);
        struct engine_job talk = job_of(5, 10, 60, full());
        submit(&w, &talk);
        for (int k = 0; k < 3; k++) {
            make_together(&asked[k], 1 + k, kinds[i % 4]);
            asked[k].job.request.drafts = options.drafts ? -1 : 0;
            submit(&w, &asked[k].job);
        }
        run_until_idle(&w);
        world_close(&w);
        for (int k = 0; k < 3; k++) {
            cr_assert_eq(finish_of(&asked[k].job), ENGINE_FINISH_LENGTH);
            expect_same_answer(&alone[k].job, &asked[k].job);
            close_both(&asked[k]);
            close_both(&alone[k]);
        }
        engine_job_close(&talk);
    }
}

/* Shortens a prompt to about `count` tokens, in front of the tile that would be parted. */
static void cut_prompt(struct engine_request *request, int count) {
    while ((int)request->picture_rows[request->picture_row_count - 1].at + WORLD_TILE >= count)
        request->picture_row_count--;
    const struct picture_rows *next = &request->picture_rows[request->picture_row_count];
    request->prompt_count = (int)next->at < count ? (int)next->at : count;
}

/* A prompt that parts from an earlier one behind a picture, and one that is read again, go on
 * inside and behind tiles with the same answers. */
Test(pictures, rows_that_see_each_other_are_found_again) {
    const struct engine_kv kinds[] = {full(), global(60, 8, 16), global(40, 8, 11)};
    for (int i = 0; i < 3; i++)
        for (int parts = 20; parts < 70; parts += 7) {
            struct asked first, again, alone;
            struct world_options options = options_of(32, 24);
            struct world w;
            for (int company = 0; company < 2; company++) {
                struct asked *second = company ? &again : &alone;
                world_open(&w, &options);
                make_together(&first, 1, kinds[i]);
                cut_prompt(&first.job.request, parts);
                if (company) submit(&w, &first.job), run_until_idle(&w);
                make_together(second, 1, kinds[i]);
                submit(&w, &second->job);
                run_until_idle(&w);
                world_close(&w);
                close_both(&first);
            }
            expect_same_answer(&alone.job, &again.job);
            close_both(&again);
            close_both(&alone);
        }
}

/* Nothing stands behind the last rows that see each other. */
Test(pictures, a_prompt_may_end_with_rows_that_see_each_other) {
    const struct engine_kv kinds[] = {full(), global(24, 8, 16), global(9, 0, 7)};
    for (int i = 0; i < 3 * 4; i++) {
        struct asked asked[2];
        for (int small = 0; small < 2; small++) {
            struct world_options options = options_of(32, small ? WORLD_TILE + 3 : 100);
            struct world w;
            world_open(&w, &options);
            struct engine_job talk = job_of(5, 10, 60, full());
            if (small) submit(&w, &talk);
            make_together(&asked[small], 1, kinds[i % 3]);
            struct engine_request *request = &asked[small].job.request;
            request->picture_row_count = 1 + i % 4;
            const struct picture_rows *last = &request->picture_rows[i % 4];
            request->prompt_count = (int32_t)last->at + last->count;
            submit(&w, &asked[small].job);
            run_until_idle(&w);
            world_close(&w);
            cr_assert_eq(finish_of(&asked[small].job), ENGINE_FINISH_LENGTH);
            engine_job_close(&talk);
        }
        expect_same_answer(&asked[0].job, &asked[1].job);
        close_both(&asked[0]);
        close_both(&asked[1]);
    }
}

Test(pictures, choices_read_them_once) {
    struct asked asked;
    struct world_options options = options_of(32, 32);
    struct world w;
    world_open(&w, &options);
    make(&asked, 1, 2, (int[]){1, 2}, full());
    asked.job.request.choices = 3;
    submit(&w, &asked.job);
    run_until_idle(&w);
    cr_assert_eq(w.sched.counters.encoded_tiles, 2 * TILES);
    world_close(&w);
    expect_answer(&asked);
    close_both(&asked);
}

/* A later turn encodes nothing, also of a prompt that shows a picture again; another picture is not
 * taken for the first one, though its first id is the same. */
Test(pictures, what_was_read_is_found_by_its_ids) {
    struct asked first, again, other;
    struct world_options options = options_of(2, 64);
    struct world w;
    world_open(&w, &options);
    make(&first, 1, 1, (int[]){1}, full());
    submit(&w, &first.job);
    run_until_idle(&w);
    cr_assert_eq(w.sched.counters.encoded_tiles, TILES);
    make(&again, 1, 1, (int[]){1}, full());
    memcpy(again.prompt + 60, prompt_of(9, 0) + 60, 30 * sizeof *again.prompt);
    memcpy(again.tokens + 60, prompt_of(9, 0) + 60, 30 * sizeof *again.tokens);
    submit(&w, &again.job);
    run_until_idle(&w);
    cr_assert_eq(again.job.cached_tokens, 60);
    cr_assert_eq(w.sched.counters.encoded_tiles, TILES);
    make(&other, 1, 1, (int[]){2}, full());
    other.prompt[7] = first.prompt[7];
    submit(&w, &other.job);
    run_until_idle(&w);
    cr_assert_leq(other.job.cached_tokens, 7);
    world_close(&w);
    expect_answer(&again);
    expect_answer(&other);
    close_both(&first);
    close_both(&again);
    close_both(&other);
}

/* An answer has a token in every step while a picture of another request is encoded. */
Test(pictures, answers_go_on_beside_them) {
    struct asked asked;
    struct world_options options = options_of(32, 64);
    struct world w;
    world_open(&w, &options);
    struct engine_job talk = job_of(5, 10, 60, full());
    submit(&w, &talk);
    world_step(&w);
    make(&asked, 1, 2, (int[]){1, 2}, full());
    submit(&w, &asked.job);
    for (int before = count_of(&talk); w.sched.counters.encoded_tiles < 2 * TILES; before++) {
        cr_assert_eq(count_of(&talk), before);
        world_step(&w);
    }
    cr_assert_geq(count_of(&talk), 2 * TILES * WORLD_TILE_PARTS);
    run_until_idle(&w);
    world_close(&w);
    expect_answer(&asked);
    engine_job_close(&talk);
    close_both(&asked);
}

/* A client that asks about few pictures does not wait for one that shows many. */
Test(pictures, clients_share_the_encoder) {
    struct asked many[2], one;
    struct world_options options = options_of(32, 64);
    struct world w;
    world_open(&w, &options);
    for (int i = 0; i < 2; i++) {
        make(&many[i], 1 + i, 3, (int[]){3 * i, 3 * i + 1, 3 * i + 2}, full());
        many[i].job.request.client[0] = 1;
        submit(&w, &many[i].job);
    }
    for (int i = 0; i < 4; i++) world_step(&w);
    make(&one, 4, 1, (int[]){7}, full());
    one.job.request.client[0] = 2;
    submit(&w, &one.job);
    while (count_of(&one.job) == 0) world_step(&w);
    cr_assert_leq(w.sched.counters.encoded_tiles, 3 * TILES);
    run_until_idle(&w);
    world_close(&w);
    expect_answer(&one);
    for (int i = 0; i < 2; i++) close_both(&many[i]);
    close_both(&one);
}

/* A draft model, which sees no pictures, is not asked about them, and goes on to guess for others.
 */
Test(pictures, a_draft_model_guesses_for_others) {
    struct asked asked;
    struct world_options options = options_of(32, 128);
    struct world w;
    options.logits = 64;
    options.drafts = DRAFT_MAX;
    options.draft_texts = 4;
    world_open(&w, &options);
    struct engine_job talk = job_of(5, 10, 60, full()), same = talk;
    talk.request.drafts = -1;
    make(&asked, 1, 3, (int[]){1, 2, 3}, full());
    asked.job.request.max_tokens = asked.plain.request.max_tokens = 60;
    asked.job.request.drafts = -1;
    submit(&w, &asked.job);
    submit(&w, &talk);
    run_until_idle(&w);
    cr_assert_eq(w.sched.counters.drafter_failures, 0);
    cr_assert_gt(w.sched.counters.model_confirmed_tokens, 0);
    world_close(&w);
    expect_answer(&asked);
    run_alone(&same);
    expect_same_answer(&same, &talk);
    engine_job_close(&talk);
    engine_job_close(&same);
    close_both(&asked);
}

Test(pictures, a_cancelled_request_leaves_the_encoder_to_others) {
    struct asked gone, next;
    struct world_options options = options_of(2, 64);
    struct world w;
    world_open(&w, &options);
    make(&gone, 1, 2, (int[]){1, 2}, full());
    submit(&w, &gone.job);
    for (int i = 0; i < 2; i++) world_step(&w);
    atomic_store(&gone.job.cancel, 1);
    run_until_idle(&w);
    cr_assert_eq(finish_of(&gone.job), ENGINE_FINISH_ABORT);
    make(&next, 2, 1, (int[]){4}, full());
    submit(&w, &next.job);
    run_until_idle(&w);
    world_close(&w);
    expect_answer(&next);
    close_both(&gone);
    close_both(&next);
}

Test(pictures, an_encoder_that_fails_ends_what_runs) {
    for (int part = 0; part < 2 * WORLD_TILE_PARTS; part++) {
        struct asked asked, next;
        struct world_options options = options_of(2, 64);
        struct world w;
        world_open(&w, &options);
        make(&asked, 1, 1, (int[]){1}, full());
        submit(&w, &asked.job);
        world_fail(WORLD_ENCODE, part, ERR_NOMEM);
        run_until_idle(&w);
        cr_assert_eq(finish_of(&asked.job), ENGINE_FINISH_ERROR);
        world_fail_never();
        make(&next, 1, 1, (int[]){1}, full());
        submit(&w, &next.job);
        run_until_idle(&w);
        world_close(&w);
        expect_answer(&next);
        close_both(&asked);
        close_both(&next);
    }
}

Test(pictures, memory_for_a_tile_is_the_request_s) {
    struct asked asked;
    struct world_options options = options_of(2, 64);
    struct world w;
    world_open(&w, &options);
    struct engine_job talk = job_of(5, 10, 60, full());
    submit(&w, &talk);
    make(&asked, 1, 1, (int[]){1}, full());
    submit(&w, &asked.job);
    for (int i = 0; i < WORLD_TILE_PARTS; i++) world_step(&w);
    cr_assert_eq(w.sched.counters.encoded_tiles, 1);
    mem_fail_after(0); /* the next tile's rows */
    world_step(&w);
    cr_assert_not(mem_fail_pending());
    mem_fail_after(-1);
    cr_assert_eq(finish_of(&asked.job), ENGINE_FINISH_ERROR);
    run_until_idle(&w);
    cr_assert_eq(finish_of(&talk), ENGINE_FINISH_LENGTH);
    world_close(&w);
    engine_job_close(&talk);
    close_both(&asked);
}

static int begin_nothing(void *encoder, const struct picture *picture, int tile) {
    (void)encoder;
    (void)picture;
    (void)tile;
    return 0;
}

static int write_ones(void *encoder, float *out, bool *done) {
    (void)encoder;
    out[0] = 1;
    *done = true;
    return 0;
}

static void encode_tile(struct pictures *kept, const struct picture *picture, int tile) {
    cr_assert(pictures_have_room(kept, picture));
    cr_assert_eq(pictures_begin(kept, picture, tile), 0);
    cr_assert_null(pictures_find(kept, picture, tile), "not before it is done");
    cr_assert_eq(pictures_advance(kept), 0);
    cr_assert_null(kept->present);
}

/* Small tiles make room for a large one; needed ones stay. */
Test(pictures, are_kept_within_bytes) {
    const struct picture small = {.tiles = 9, .tile_tokens = 2, .digest = {1}},
                         large = {.tiles = 9, .tile_tokens = 5, .digest = {2}};
    struct pictures kept;
    const struct pictures_options options = {.encoder = &kept,
                                             .begin = begin_nothing,
                                             .advance = write_ones,
                                             .width = 3,
                                             .bytes_max = 10 * 3 * sizeof(float)};
    pictures_open(&kept, &options);
    for (int tile = 0; tile < 5; tile++) encode_tile(&kept, &small, tile);
    cr_assert_eq(kept.bytes, options.bytes_max);
    cr_assert_not_null(pictures_find(&kept, &small, 0));
    encode_tile(&kept, &large, 0);
    cr_assert_not_null(pictures_find(&kept, &small, 0), "was used last");
    for (int tile = 1; tile < 4; tile++) cr_assert_null(pictures_find(&kept, &small, tile));
    cr_assert_not_null(pictures_find(&kept, &small, 4));
    cr_assert_eq(kept.bytes, 9 * 3 * sizeof(float));
    pictures_release(&kept);
    cr_assert(pictures_need(&kept, &small, 0) && pictures_need(&kept, &small, 0));
    cr_assert(!pictures_need(&kept, &small, 1));
    cr_assert(pictures_have_room(&kept, &large));
    cr_assert(pictures_need(&kept, &small, 4) && pictures_need(&kept, &large, 0));
    cr_assert(!pictures_have_room(&kept, &large) && !pictures_have_room(&kept, &small));
    pictures_release(&kept);
    cr_assert(pictures_need(&kept, &small, 0));
    encode_tile(&kept, &large, 1);
    cr_assert_not_null(pictures_find(&kept, &small, 0));
    cr_assert_null(pictures_find(&kept, &large, 0));
    encode_tile(&kept, &small, 5);
    pictures_release(&kept);
    cr_assert(pictures_need(&kept, &small, 0));
    cr_assert(pictures_find(&kept, &large, 1) && pictures_find(&kept, &small, 5));
    encode_tile(&kept, &small, 6);
    cr_assert_not_null(pictures_find(&kept, &small, 0), "is needed, though others were used later");
    cr_assert_null(pictures_find(&kept, &large, 1));
    pictures_close(&kept);
}

/* ---- Places of three dimensions ---- */

static struct world_options axes_options(int tiles, int rows) {
    struct world_options options = options_of(tiles, rows);
    options.positions = WORLD_POSITIONS;
    options.axes = true;
    return options;
}

/* The world checks places in each step. Answers are the same in steps of many and of few rows, with
 * drafts, beside others, with evictions in the middle of pictures, and of choices. */
Test(pictures, places_in_any_step) {
    const struct engine_kv kinds[] = {full(), global(24, 8, 16), global(12, 4, 8)};
    struct asked first[3];
    for (int i = 0; i < 12; i++) {
        struct asked asked[3];
        struct world_options options = axes_options(i % 2 ? 2 : 32, i % 4 < 2 ? 64 : 6);
        struct world w;
        options.drafts = i % 4 ? DRAFT_MAX : 0;
        options.logits = i % 4 < 2 ? 24 : 6;
        world_open(&w, &options);
        for (int k = 0; k < 3; k++) {
            make(&asked[k], 1 + k, 3, (int[]){k, 3, k + 1}, kinds[i % 3]);
            asked[k].job.request.drafts = options.drafts ? -1 : 0;
            asked[k].job.request.choices = 1 + i / 6;
            submit(&w, &asked[k].job);
        }
        run_until_idle(&w);
        world_close(&w);
        if (i < 3) first[i] = asked[0];
        if (i >= 3 && i < 6) expect_same_answer(&first[i % 3].job, &asked[0].job);
        for (int k = 0; k < 3; k++)
            if (i >= 3 || k > 0) close_both(&asked[k]);
    }
    for (int i = 0; i < 3; i++) close_both(&first[i]);
}

/* A turn that goes on from a cut behind two pictures, or in the middle of one, has the answer of
 * one that is read from its beginning. */
Test(pictures, places_behind_a_cut) {
    for (int at = 55; at < 75; at += 2) {
        struct asked asked[3];
        struct world_options options = axes_options(32, 64);
        for (int alone = 0; alone < 2; alone++) {
            struct world w;
            world_open(&w, &options);
            for (int k = alone; k < 2; k++) {
                struct asked *one = &asked[alone + k];
                make(one, 1, 3, (int[]){1, 3, 5}, full());
                if (k == 1)
                    for (int i = at; i < PROMPT; i++)
                        if (!engine_is_picture_id(one->prompt[i]))
                            one->prompt[i] = prompt_of(9, 0)[i];
                submit(&w, &one->job);
                run_until_idle(&w);
            }
            world_close(&w);
        }
        cr_assert_gt(asked[1].job.cached_tokens, 40);
        cr_assert_eq(asked[2].job.cached_tokens, 0);
        expect_same_answer(&asked[1].job, &asked[2].job);
        for (int i = 0; i < 3; i++) close_both(&asked[i]);
    }
}

/* Rules that take places for a function of positions are refused beside pictures, and only there.
 */
Test(pictures, rules_that_rotate_again) {
    struct engine_kv kinds[] = {global(24, 8, 16), global(24, 8, 16), global(24, 8, 16)};
    static const char *const fields[] = {"kv.policy", "kv.policy", "kv.overflow"};
    struct world_options options = axes_options(32, 64);
    struct world w;
    kinds[0].policy = "ems";
    kinds[1].policy = "expected_attention";
    kinds[2].overflow = ENGINE_OVERFLOW_SHIFT;
    world_open(&w, &options);
    for (int i = 0; i < 3; i++) {
        struct asked asked;
        make(&asked, 1, 1, (int[]){1}, kinds[i]);
        cr_assert_eq(world_submit(&w, &asked.job), ERR_UNSUPPORTED);
        cr_assert_str_eq(asked.job.fault.field, fields[i]);
        cr_assert_eq(world_submit(&w, &asked.plain), 0);
        run_until_idle(&w);
        close_both(&asked);
    }
    world_close(&w);
}
