/* Steps that repeat, launched as one graph.
 *
 * Everything queued on a device passes through graph_add as data: a function and its arguments,
 * byte by byte. Between graph_begin and graph_end the operations are compared with those of the
 * last region of the same key, and put off as long as they agree. If all of them do, nothing is
 * queued one by one: the graph that was captured of them is launched. At the first difference what
 * was put off is queued as it is, the rest follows at once, and the new list takes the old one's
 * place. So a captured argument can never be stale: a graph runs only when every pointer and every
 * number is what it was, and what changes from step to step lies in device memory, at the same
 * places. No batch is padded: a key has the very rows it names.
 *
 * C++, for the sources of this folder only; the engine thread. */
#ifndef KEEPD_KERNELS_CUDA_GRAPH_H
#define KEEPD_KERNELS_CUDA_GRAPH_H

#include <stddef.h>
#include <stdint.h>

struct device;

/* Queues one operation. `args`: aligned to 16, without bytes that mean nothing. */
typedef void graph_run(struct device *device, const void *args);

struct graph_list {
    char *data; /* operations one after the other */
    size_t bytes, room;
};

/* A region that was seen. */
struct graph {
    uint64_t key, used; /* used: when, 0 = never */
    struct graph_list list;
    void *captured; /* the device's; NULL: none yet */
    int misses;     /* times it was not what it had been, since it last was */
};

/* Of a decoding step that repeats. What bounds it is the room for its lists (about 200 bytes a row
 * of DEVICE_REPEAT_BYTES) and that there are GRAPHS_MAX keys: comparing costs the same for any. */
#define GRAPH_ROWS_MAX 256
#define GRAPHS_MAX     64                /* the one not used for longest makes room */
#define GRAPH_MISSES   16                /* after so many a key is let run as it comes */
#define GRAPH_OPS_SIZE ((size_t)4 << 20) /* a list beyond this is no step to repeat */

enum graph_mode {
    GRAPH_OFF,     /* no region, or one that cannot repeat: everything is queued at once */
    GRAPH_RECORD,  /* queued at once, and noted */
    GRAPH_COMPARE, /* put off: the same as the last time, so far */
};

struct graphs {
    struct graph table[GRAPHS_MAX];
    struct graph *open; /* the region's; NULL: none is open */
    enum graph_mode mode;
    size_t at;               /* GRAPH_COMPARE: bytes of open->list that agree */
    struct graph_list fresh; /* GRAPH_RECORD: of this region */
    uint64_t clock, replays; /* regions begun; launched as a graph */
    uint64_t queued;         /* operations so far, and what did not pass through graph_add */
};

void graph_begin(struct graphs *graphs, struct device *device, uint64_t key);
void graph_add(struct graphs *graphs, struct device *device, graph_run *run, const void *args,
               size_t bytes);
/* Queues what was put off: before anything that does not pass through graph_add. The open region
 * will not be a graph. */
void graph_settle(struct graphs *graphs, struct device *device);
void graph_end(struct graphs *graphs, struct device *device); /* fine without a region */
void graph_close(struct graphs *graphs, struct device *device);
void graph_play(struct device *device, const struct graph_list *list); /* queues all of it */

/* The device's part. */
void *device_capture(struct device *device, const struct graph_list *list); /* NULL: it cannot */
void device_replay(struct device *device, void *captured);
void device_forget_graph(struct device *device, void *captured);

#endif
