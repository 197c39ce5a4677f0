/* A small world for the scheduler: the real paged cache of the CPU backend and a fake model whose
 * logits come from attention over what the cache really keeps, so that one wrongly kept or lost
 * entry changes an answer. Used by sim_sched and tests/unit/engine/test_sched*.c. */
#ifndef KEEPD_TESTS_WORLD_H
#define KEEPD_TESTS_WORLD_H

#include "engine/steps/sched.h"

enum { WORLD_LAYERS = 2, WORLD_HEADS_Q = 4, WORLD_HEADS_KV = 2, WORLD_DIM = 16, WORLD_VOCAB = 40 };
enum { WORLD_STREAMS = WORLD_LAYERS * WORLD_HEADS_KV };
enum { WORLD_HIDDEN = WORLD_HEADS_Q * WORLD_DIM }; /* numbers of a hidden state */
enum { WORLD_POSITIONS = 640 };
/* A recurrent state is a short convolution whose channels fill two pages. */
enum { WORLD_CHANNELS = 150, WORLD_WIDTH = 16 };

struct world_options {
    const char *path; /* path of the CPU backend; NULL = reference */
    int threads;      /* 0 = 1 */
    int64_t pages;
    int positions; /* number of the model's positions, with keys that rotate; 0 = WORLD_POSITIONS,
                      and keys do not */
    int sequences, conversations;
    int drafts;            /* see struct sched_options */
    int rows;              /* rows of a step */
    int logits;            /* logits of a step; 0 = sequences + 4 */
    const char *state_dir; /* conversations go there and come back, inside the calls; NULL = none */
    int64_t state_bytes;   /* 0 = plenty */
    bool state_eager;      /* write every conversation as soon as possible, not only for room */
    bool state_hangs;      /* reading one does not end before world_end_hang; on its own thread */
    size_t
        copy_bytes;   /* bytes copied per step; 0 = SCHED_COPY_BYTES, which is everything at once */
    int row_entries;  /* see struct sched_options; 0 = KV_ROW_ENTRIES; 1: evictions cost much */
    int clients;      /* clients that the queue distinguishes; 0 = 32 */
    int step_stretch; /* see struct sched_options; steps then take the time of world_step_ns */
    int check_each;   /* steps between two checks of the whole cache, which take as long as a step
                         of many sequences; 0 = 1 */
    int sliding_window; /* The window of every second layer, from the first on; 0: none. */
    int states;         /* recurrent states beside the layers' entries */
    /* A draft model, which is the same model over a cache of its own. */
    int draft_texts;     /* most texts at once; 0: there is no draft model */
    int draft_places;    /* tokens of a text; 0 = WORLD_POSITIONS */
    int draft_after;     /* tokens of an answer before its text is read; 0 = DRAFTER_READ_AFTER */
    double draft_weight; /* see drafter_options; 0 = 0.05 */
    int draft_wrong;     /* logits of a hundred that are others than the model's */
    int draft_extra;     /* tokens that only the draft model has, and finds the likeliest */
    int draft_fails;     /* steps, and cuts of its texts, of a hundred that fail */
    bool draft_block;    /* hidden states are read, as by a block of the model's files does */
    int tiles;           /* encoded tiles that are kept; 0: there is no encoder of pictures */
    bool axes;           /* with positions: places have three dimensions, and are checked */
};

/* Pictures. The encoder makes of each row of a tile one number, world_picture_row, which the fake
 * model takes for a token: a prompt with these tokens has the same answer. */
enum { WORLD_TILE = 6, WORLD_TILE_PARTS = 3 }; /* most rows of a tile, parts of its work */
static inline int32_t world_picture_row(int picture, int tile, int row) {
    return WORLD_VOCAB + picture * 1000 + tile * 10 + row;
}

/* Operations of the backend that can be made to fail. */
enum world_op {
    WORLD_BEGIN_STEP,
    WORLD_EVICT,
    WORLD_SAMPLE,
    WORLD_SYNC,
    WORLD_REPORT,
    WORLD_TRUNCATE,
    WORLD_FORK,
    WORLD_EXPORT,
    WORLD_IMPORT,
    WORLD_SHIFT,  /* see test_sched_shift.c */
    WORLD_LOGITS, /* with any code: the logits of the first row that is sampled become NaN */
    WORLD_ENCODE, /* a part of a tile */
    WORLD_OPS
};

#define WORLD_WANTED 256 /* most rows of logits of a step */

struct world {
    struct kern *kern;
    struct kern_ops ops; /* the backend's, with failures */
    const struct kern_ops *real;
    struct store *store;
    float *qkv, *log_beta, *out, *logits;
    float *bcx, *mixed, *taps;       /* convolutions */
    int32_t peeked[SCHED_PEEK_ROWS]; /* tokens of the last step's spans that peeked */
    int peeked_count;
    struct kern *draft; /* the draft model's backend, and logits */
    struct kern_ops draft_ops;
    float *draft_logits;
    int draft_rows; /* rows of its steps so far */
    /* The only number of a hidden state is the token of its row. */
    float wanted_hidden[WORLD_WANTED], draft_hidden[DRAFTER_ASKED];
    int32_t *draft_tokens; /* [draft_texts][draft_places] in the draft model's cache */
    int32_t *tokens;       /* [rows] of the step, with those that pictures stand for */
    int picture, tile, tile_rows, parts; /* the present tile, whose digest begins with the picture's
                                            number, and the parts of its work that are done */
    int rows_of[UINT8_MAX + 1];          /* rows of a tile of each picture that was encoded */
    struct world_options options;
    struct sched sched;
    atomic_int places, pending; /* counters of the engine */
    int64_t now_ns;             /* the time of saving; 0: the clock's */
    int64_t spent_ns;           /* the time that all steps have taken, see world_step_ns */
    int unchecked;              /* steps since the check of the whole cache */
    /* results of the last step */
    struct kern_span spans[64];
    int span_count, rows, want_count;
};

/* Token 0 is EOS and has no text; the others are one letter each. */
size_t world_token_bytes(const void *arg, int32_t id, const char **bytes);

void world_open(struct world *world, const struct world_options *options);
/* Checks that nothing leaks. */
void world_close(struct world *world);

/* Takes a queue place and submits; the job's arrays are allocated here. */
int world_submit(struct world *world, struct engine_job *job);

/* Makes a step, then checks the invariants: the cache's own check (see check_each), pages used <=
 * reserved + retained <= pool, no preemption unless a failure is planned. Returns whether the
 * device failed. */
bool world_step(struct world *world);
void world_check(const struct world *world);

/* The time that a step takes: for the model, for each answer and for each prompt row. */
static inline int64_t world_step_ns(int streams, int prompt_rows) {
    return 4000000 + streams * (int64_t)1000000 + prompt_rows * (int64_t)500000;
}

/* The n-th next call of `op` (0 = the very next) returns `rc` and does nothing. */
void world_fail(enum world_op op, long n, int rc);
bool world_fail_pending(void);
void world_fail_never(void);

/* Waits until a read hangs, then lets it continue. */
void world_await_hang(void);
void world_end_hang(void);

/* Writes everything that can be written to disk. */
void world_save_all(struct world *world);
/* Creates a state directory; removes it. */
void world_make_dir(char dir[64]);
void world_remove_dir(const char *dir);

/* Random numbers: splitmix64. */
uint64_t world_mix(uint64_t x);

#endif
