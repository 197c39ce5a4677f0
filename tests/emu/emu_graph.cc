/* kernels/cuda/graph.h: whatever repeats, breaks off, is settled in the middle or cannot be
 * captured, every operation runs once, in order, with the arguments it was added with; and what
 * repeats is a graph, decoding steps up to GRAPH_ROWS_MAX rows among them. */
#include <stdio.h>
#include <stdlib.h>

#include <vector>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/device.h"

struct note {
    int64_t what, more[3];
};

static std::vector<int64_t> done, wanted;
static struct device *device;
static uint64_t state = 1;

static unsigned draw(unsigned below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(state >> 33) % below;
}

static void run_note(struct device *, const void *args) {
    done.push_back(static_cast<const struct note *>(args)->what);
}

/* Arguments of two sizes, so that operations do not all lie at equal distances. */
static void add(int64_t what) {
    const struct note note = {what, {what, 0, 0}};
    wanted.push_back(what);
    graph_add(device_graphs(device), device, run_note, &note,
              what % 2 ? sizeof note : sizeof note.what);
}

static void expect_all_done() {
    CHECK(done == wanted);
    done.clear();
    wanted.clear();
}

static uint64_t replays() {
    return device_graphs(device)->replays;
}

/* A region of `count` operations from `first` on; one of them another at place `odd`. */
static void region(uint64_t key, int count, int64_t first, int odd) {
    graph_begin(device_graphs(device), device, key);
    for (int i = 0; i < count; i++) add(i == odd ? -7 : first + i);
    graph_end(device_graphs(device), device);
    expect_all_done();
}

static void test_what_repeats() {
    uint64_t before = replays();
    for (int i = 0; i < 5; i++) region(1, 9, 100, -1);
    CHECK(replays() == before + 4);
    region(1, 9, 100, 4);   /* differs in the middle, */
    region(1, 8, 100, -1);  /* ends early, */
    region(1, 12, 100, -1); /* goes on, */
    region(1, 0, 0, -1);    /* is empty: */
    CHECK(replays() == before + 4);
    for (int i = 0; i < 3; i++) region(1, 12, 100, -1); /* and is seen again */
    CHECK(replays() == before + 6);
    for (int i = 0; i < 3; i++) region(2, 12, 100, -1);
    CHECK(replays() == before + 8);
    add(5); /* outside of regions */
    expect_all_done();
}

/* Something that cannot be put off comes in between. */
static void test_settling() {
    uint64_t before = replays();
    for (int i = 0; i < 4; i++) {
        graph_begin(device_graphs(device), device, 3);
        for (int k = 0; k < 6; k++) {
            add(200 + k);
            if (i != 1 && k == 3) {
                graph_settle(device_graphs(device), device);
                CHECK(done == wanted);
            }
        }
        graph_end(device_graphs(device), device);
        expect_all_done();
    }
    CHECK(replays() == before);
}

/* Steps that never repeat are run directly; nothing is deferred any more. */
static void test_giving_up() {
    for (int i = 0; i < GRAPH_MISSES + 3; i++) region(4, 5, 1000 + 10 * i, -1);
    graph_begin(device_graphs(device), device, 4);
    add(1);
    CHECK(done.size() == 1 && device_graphs(device)->mode == GRAPH_OFF);
    graph_end(device_graphs(device), device);
    expect_all_done();
}

static void test_more_keys_than_places() {
    for (int round = 0; round < 3; round++)
        for (uint64_t key = 10; key < 10 + 2 * GRAPHS_MAX; key++) region(key, 4, (int64_t)key, -1);
    uint64_t before = replays();
    for (int i = 0; i < 3; i++) region(10, 4, 10, -1); /* had made room */
    CHECK(replays() == before + 2);
}

/* The n-th allocation fails: of the list, or of the captured copy. */
static void test_missing_memory() {
    for (int n = 0; n < 6; n++) {
        for (int i = 0; i < 4; i++) {
            mem_fail_after(i == n % 3 ? n / 3 : -1);
            region(500 + (uint64_t)n, 3000, 1, -1); /* larger than the first room of a list */
            mem_fail_after(-1);
        }
    }
}

static void test_anything() {
    for (int i = 0; i < 3000; i++) {
        int first = (int)draw(2) * 50, count = 1 + (int)draw(6);
        if (draw(10) == 0) mem_fail_after(draw(3));
        graph_begin(device_graphs(device), device, 900 + draw(90));
        for (int k = 0; k < count; k++) {
            add(draw(12) == 0 ? 77 : first + k);
            if (draw(40) == 0) graph_settle(device_graphs(device), device);
        }
        if (draw(8)) graph_end(device_graphs(device), device); /* else the next one ends it */
        mem_fail_after(-1);
    }
    graph_end(device_graphs(device), device);
    expect_all_done();
}

/* Steps that a graph was launched for, of `count` that append one entry to each of `rows` slots. */
static int repeated_steps(struct kern *kern, int rows, int count) {
    static int32_t pos; /* position of the next token of every slot */
    uint64_t before = cuda_replays(kern);
    std::vector<struct kern_span> spans(static_cast<size_t>(rows));
    struct kern_batch batch = {};
    batch.spans = spans.data();
    batch.span_count = batch.rows = rows;
    for (int i = 0; i < count; i++, pos++) {
        for (int row = 0; row < rows; row++) {
            struct kern_span *span = &spans[static_cast<size_t>(row)];
            span->slot = span->row = row;
            span->count = 1;
            span->pos = pos;
        }
        CHECK(kern->ops->begin_step(kern, &batch) == 0);
        CHECK(kern->ops->sync(kern) == 0);
    }
    return static_cast<int>(cuda_replays(kern) - before);
}

static void test_rows_of_steps() {
    struct fault fault = {};
    struct kern *kern;
    const struct cuda_options options = {};
    struct kern_cache_options cache = {};
    cache.layers = cache.heads_q = cache.heads_kv = 1;
    cache.head_dim = cache.max_positions = 64;
    cache.dtype = KERN_BF16;
    cache.slots = GRAPH_ROWS_MAX + 1;
    cache.pages = 2 * cache.slots;
    CHECK(cuda_open(&options, &kern, &fault) == 0);
    CHECK(kern->ops->cache_open(kern, &cache, &fault) == 0);
    CHECK(repeated_steps(kern, GRAPH_ROWS_MAX + 1, 1) == 0); /* from now on all slots are in use */
    /* The first of as many rows gives the emulator's lists their places, the second is noted. */
    CHECK(repeated_steps(kern, 1, 4) == 2);
    CHECK(repeated_steps(kern, GRAPH_ROWS_MAX, 4) == 2);
    CHECK(repeated_steps(kern, GRAPH_ROWS_MAX + 1, 4) == 0);
    kern->ops->close(kern);
}

int main() {
    struct fault fault = {};
    CHECK(device_open(0, &device, &fault) == 0);
    test_what_repeats();
    test_settling();
    test_giving_up();
    test_more_keys_than_places();
    test_missing_memory();
    test_anything();
    device_close(device);
    test_rows_of_steps();
    puts("graphs: every operation once and in order");
    return 0;
}
