/* Repeated steps, launched as one graph.
 *
 * Everything queued on a device passes through graph_add as data: a function and its arguments,
 * byte by byte. Between graph_begin and graph_end the operations are compared with those of the
 * last region of the same key, and deferred while they agree. If all agree, nothing is queued one
 * by one: the graph captured from them is launched. At the first difference the deferred operations
 * are queued, the rest follows directly, and the new list replaces the old one. So a captured
 * argument can never be stale: a graph runs only if every pointer and every number is unchanged;
 * data that changes from step to step is in device memory, at constant addresses. Batches are not
 * padded: a key stands for an exact number of rows.
 *
 * C++, for the sources of this folder only; the engine thread. */
#ifndef KEEPD_KERNELS_CUDA_GRAPH_H
#define KEEPD_KERNELS_CUDA_GRAPH_H

#include <stddef.h>
#include <stdint.h>

struct device;

/* Queues one operation. `args`: aligned to 16, without uninitialised padding. */
typedef void graph_run(struct device *device, const void *args);

struct graph_list {
    char *data; /* consecutive operations */
    size_t bytes, room;
};

/* A region that has been seen. */
struct graph {
    uint64_t key, used; /* used: time of the last use, 0 = never */
    struct graph_list list;
    void *captured; /* the device's captured graph; NULL: none yet */
    int misses;     /* number of differences since the last agreement */
};

/* Upper bound for the rows of a repeated decoding step. It is limited by the memory for the step's
 * lists (about 200 bytes a row of DEVICE_REPEAT_BYTES) and by GRAPHS_MAX keys; comparing costs the
 * same for any number of rows. */
#define GRAPH_ROWS_MAX 256
#define GRAPHS_MAX     64                /* the least recently used one is replaced */
#define GRAPH_MISSES   16                /* after so many, a key is no longer compared */
#define GRAPH_OPS_SIZE ((size_t)4 << 20) /* a longer list is not recorded */

enum graph_mode {
    GRAPH_OFF,     /* no region, or one that is not compared: everything is queued at once */
    GRAPH_RECORD,  /* queued at once and recorded */
    GRAPH_COMPARE, /* deferred: equal to the last time so far */
};

struct graphs {
    struct graph table[GRAPHS_MAX];
    struct graph *open; /* graph of the open region; NULL: no region is open */
    enum graph_mode mode;
    size_t at;               /* GRAPH_COMPARE: bytes of open->list that agree so far */
    struct graph_list fresh; /* GRAPH_RECORD: list of this region */
    uint64_t clock, replays; /* regions begun; regions launched as a graph */
    uint64_t queued; /* operations so far, including those that did not pass through graph_add */
};

void graph_begin(struct graphs *graphs, struct device *device, uint64_t key);
void graph_add(struct graphs *graphs, struct device *device, graph_run *run, const void *args,
               size_t bytes);
/* Queues the deferred operations; called before anything that does not pass through graph_add. The
 * open region will not be a graph. */
void graph_settle(struct graphs *graphs, struct device *device);
void graph_end(struct graphs *graphs, struct device *device); /* allowed without a region */
void graph_close(struct graphs *graphs, struct device *device);
void graph_play(struct device *device, const struct graph_list *list); /* queues all operations */

/* Implemented by the device. */
void *device_capture(struct device *device, const struct graph_list *list); /* NULL: it cannot */
void device_replay(struct device *device, void *captured);
void device_forget_graph(struct device *device, void *captured);

#endif
