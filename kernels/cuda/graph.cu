/* Compares the operations of a region with those of the last region of the same key, and launches
 * them as one graph while they agree (kernels/cuda/graph.h). */
#include "kernels/cuda/graph.h"

#include <string.h>

#include "kernels/cuda/device.h"

/* An operation in a list; its arguments follow. */
struct alignas(16) graph_op {
    graph_run *run;
    size_t bytes; /* bytes of the arguments, as given */
};

static size_t size_of(const struct graph_op *op) {
    return sizeof *op + (op->bytes + 15) / 16 * 16;
}

static const struct graph_op *op_at(const struct graph_list *list, size_t at) {
    return reinterpret_cast<const struct graph_op *>(list->data + at);
}

/* Appends to a list; false if there is no memory, or the list would be too long. */
static bool append(struct graph_list *list, const void *data, size_t bytes) {
    if (bytes == 0) return true;
    if (list->bytes + bytes > GRAPH_OPS_SIZE) return false;
    if (list->bytes + bytes > list->room) {
        size_t room = list->room ? 2 * list->room : (size_t)64 << 10;
        while (room < list->bytes + bytes) room *= 2;
        char *data_now = static_cast<char *>(mem_try_realloc(list->data, list->room, room));
        if (!data_now) return false;
        list->data = data_now;
        list->room = room;
    }
    memcpy(list->data + list->bytes, data, bytes);
    list->bytes += bytes;
    return true;
}

static bool append_op(struct graph_list *list, graph_run *run, const void *args, size_t bytes) {
    const struct graph_op op = {run, bytes};
    static const char zeros[16] = {};
    return append(list, &op, sizeof op) && append(list, args, bytes) &&
           append(list, zeros, size_of(&op) - sizeof op - bytes);
}

static void play(struct device *device, const struct graph_list *list, size_t until) {
    for (size_t at = 0; at < until; at += size_of(op_at(list, at)))
        op_at(list, at)->run(device, op_at(list, at) + 1);
}

void graph_play(struct device *device, const struct graph_list *list) {
    play(device, list, list->bytes);
}

/* ---- Regions ---- */

static void drop_capture(struct device *device, struct graph *graph) {
    if (graph->captured) device_forget_graph(device, graph->captured);
    graph->captured = NULL;
}

static void forget(struct device *device, struct graph *graph) {
    drop_capture(device, graph);
    mem_free(graph->list.data);
    *graph = {};
}

static struct graph *find(struct graphs *graphs, struct device *device, uint64_t key) {
    struct graph *oldest = &graphs->table[0];
    for (struct graph &graph : graphs->table) {
        if (graph.used && graph.key == key) return &graph;
        if (graph.used < oldest->used) oldest = &graph;
    }
    forget(device, oldest);
    oldest->key = key;
    return oldest;
}

void graph_begin(struct graphs *graphs, struct device *device, uint64_t key) {
    graph_end(graphs, device);
    struct graph *graph = graphs->open = find(graphs, device, key);
    graph->used = ++graphs->clock;
    graphs->at = 0;
    graphs->fresh.bytes = 0;
    graphs->mode = graph->misses > GRAPH_MISSES ? GRAPH_OFF
                   : graph->list.bytes          ? GRAPH_COMPARE
                                                : GRAPH_RECORD;
}

/* Queues the deferred operations and continues without comparing. */
static void fall_back(struct graphs *graphs, struct device *device) {
    const struct graph_list *list = &graphs->open->list;
    play(device, list, graphs->at);
    graphs->mode = append(&graphs->fresh, list->data, graphs->at) ? GRAPH_RECORD : GRAPH_OFF;
}

static bool agrees(const struct graphs *graphs, graph_run *run, const void *args, size_t bytes) {
    const struct graph_list *list = &graphs->open->list;
    if (graphs->at == list->bytes) return false;
    const struct graph_op *op = op_at(list, graphs->at);
    return op->run == run && op->bytes == bytes && memcmp(op + 1, args, bytes) == 0;
}

void graph_add(struct graphs *graphs, struct device *device, graph_run *run, const void *args,
               size_t bytes) {
    graphs->queued++;
    if (graphs->mode == GRAPH_COMPARE) {
        if (agrees(graphs, run, args, bytes)) {
            graphs->at += size_of(op_at(&graphs->open->list, graphs->at));
            return;
        }
        fall_back(graphs, device);
    }
    if (graphs->mode == GRAPH_RECORD && !append_op(&graphs->fresh, run, args, bytes))
        graphs->mode = GRAPH_OFF;
    run(device, args);
}

void graph_settle(struct graphs *graphs, struct device *device) {
    graphs->queued++;
    if (graphs->mode == GRAPH_COMPARE) fall_back(graphs, device);
    graphs->mode = GRAPH_OFF;
}

/* All operations equal those of the last time: launches the graph, or captures it first. */
static void replay(struct graphs *graphs, struct device *device, struct graph *graph) {
    graph->misses = 0;
    if (!graph->captured) graph->captured = device_capture(device, &graph->list);
    if (graph->captured) {
        device_replay(device, graph->captured);
        graphs->replays++;
    } else {
        graph_play(device, &graph->list);
        graph->misses = GRAPH_MISSES + 1;
    }
}

void graph_end(struct graphs *graphs, struct device *device) {
    struct graph *graph = graphs->open;
    if (!graph) return;
    if (graphs->mode == GRAPH_COMPARE && graphs->at < graph->list.bytes) fall_back(graphs, device);
    if (graphs->mode == GRAPH_COMPARE) {
        replay(graphs, device, graph);
    } else if (graphs->mode == GRAPH_RECORD) {
        struct graph_list old = graph->list;
        drop_capture(device, graph);
        graph->misses += old.bytes > 0;
        graph->list = graphs->fresh;
        graphs->fresh = old;
    } else {
        graph->misses++;
    }
    graphs->open = NULL;
    graphs->mode = GRAPH_OFF;
}

void graph_close(struct graphs *graphs, struct device *device) {
    graph_end(graphs, device);
    for (struct graph &graph : graphs->table) forget(device, &graph);
    mem_free(graphs->fresh.data);
    *graphs = {};
}
