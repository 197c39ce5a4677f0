/* Shared by the stages of an eviction on the device. Stages run in the order of
 * kernels/cpu/evict.h, over one or several sequences at once:
 *
 *   streams    k_streams, k_plan         lengths, candidates, the list of chunks (streams.cu)
 *   observe    k_look_*                  attention of the window's queries (observe.cu)
 *   redundancy k_key_norms, k_forgive    similarity of keys (redundancy.cu)
 *   score      k_score                   one key per entry (evict.cu)
 *   allot      k_allot*                  allotments of layers and streams (allot.cu)
 *   select     k_select                  the lowest-ranking kept entry (evict.cu)
 *   compact    k_compact                 closing the gaps (compact.cu)
 *
 * A subject is an observed sequence: all its streams when it evicts, those of one layer when a step
 * adds up attention. Work that reads keys is cutoff into chunks of PRODUCT_KEYS entries counted
 * from the stream's start, listed on the device, and taken by number: unequal streams give equal
 * work, and sums over chunks are computed in their order, so that they depend on the stream alone.
 * Stages that read only numbers of an entry (4 to 12 bytes; a key has 128 to 512) use a block per
 * stream.
 */
#ifndef KEEPD_KERNELS_CUDA_EVICT_CUH
#define KEEPD_KERNELS_CUDA_EVICT_CUH

#include "kernels/allot.h"
#include "kernels/cuda/internal.h"
#include "kernels/cuda/keys.cuh"
#include "kernels/cuda/logits.cuh"

/* Parts of a room, one after the other; without a base only their total size is computed. */
struct pieces {
    char *base;
    size_t used;
};

template <class T> static T *piece(struct pieces *p, size_t count) {
    p->used = (p->used + 15) / 16 * 16;
    size_t at = p->used;
    p->used += count * sizeof(T);
    return p->base ? reinterpret_cast<T *>(p->base + at) : NULL;
}

/* ---- Streams: streams.cu ---- */

struct subject {
    int32_t slot, sinks;
    int32_t limit;        /* entries with a lower pos are candidates */
    int32_t stream_first; /* first of the sequence's streams, without the launch's own offset */
    int32_t stream_count;
    int32_t state_first; /* state of its first stream, in the array of states */
};

struct stream_state {
    struct stream_place place;
    int32_t subject, stream;
    int32_t length, candidates, fixed;
    int32_t work; /* number of items in the list: its chunks */
    int32_t item; /* the first of these items */
    int32_t lead; /* entries before the first evicted one; until that is known, all */
    int32_t kept;
    int32_t best;       /* entries among the best of its scope */
    int64_t first;      /* index of its first entry in arrays with one number per entry */
    double measured[2]; /* measurements for the layer weights */
};

struct item {
    int32_t state;
    int32_t chunk;
};

struct streams_args {
    struct pages pages;
    const struct subject *subjects;
    struct stream_state *states; /* states of this rank's streams */
    struct stream_state *all;    /* [ranks][state_count], which contains `states`; see tell_all */
    int32_t ranks, rank;
    struct item *items;
    int32_t *item_count;
    int32_t stream_offset; /* added to stream_first: the layer's first stream */
    int32_t stream_most; /* the layer's streams: states behind so many of a subject are empty; 0: a
                            subject's streams are those of all layers */
    int32_t state_count;
    int64_t items_max, entries_max;
};

/* Fills the states. `most`: number of streams of the largest subject. */
void streams_find(struct cuda *cuda, const struct streams_args &args, int subjects, int most);
/* Sends all ranks' states to every rank: each rank makes the decisions over streams of several
 * ranks by itself, from the same numbers. */
void streams_tell(struct cuda *cuda, const struct streams_args &args);
/* Lists the chunks of all states, and gives each state its first entry. */
void streams_plan(struct cuda *cuda, const struct streams_args &args);
void streams_room(struct pieces *room, struct streams_args *args); /* allocates its results */
/* The largest number of chunks that streams with so many entries can have together. */
int64_t streams_items_max(int64_t streams, int64_t entries, int64_t longest);

/* State of a stream of the model: `first` is the state of its subject's first stream. */
static __device__ __forceinline__ const struct stream_state &
model_state(const struct streams_args &a, int first, int layer, int head) {
    const struct layer_place place = a.pages.layer_places[layer];
    int64_t owner = shard_owner(a.ranks, place.heads_model, head);
    return a.all[owner * a.state_count + first + place.first + head % place.heads];
}

/* ---- Attention: observe.cu ---- */

enum look_kind {
    LOOK_NONE,       /* this subject is not observed */
    LOOK_WINDOW,     /* candidates' scores -> fresh */
    LOOK_PREFERENCE, /* CAKE's two sums -> sums */
    LOOK_MASS        /* added to the entries' scores */
};

/* The observation of one subject. The query at position pos is at place (pos - origin) % modulus of
 * its queries. */
struct look {
    struct kern_observe observe;
    int32_t kind;
    int32_t query_count, origin, modulus;
    int32_t row;              /* LOOK_MASS: the step's row of the first query; otherwise 0 */
    const uint16_t *queries;  /* [layer][place][heads_q * head_dim] */
    int64_t layer_stride;     /* places of a layer; 0: queries of one layer only */
    const int32_t *query_pos; /* [query_count], ascending; NULL: from origin on */
    int64_t partial_first, stats_first, sees_first; /* where its parts of these arrays begin */
};

/* Numbers of elements of the arrays below. */
struct look_sizes {
    int64_t partial, stats, sees;
};

/* Entries [low, high) are visible to a query. */
struct sight {
    int32_t low, high;
};

/* Softmax over a row (or a combination of rows): largest logit, 1 / sum. */
struct look_stat {
    float most, scale;
};

struct look_args {
    struct streams_args streams;
    const struct look *looks;
    const int32_t *ahead; /* LOOK_MASS: as in struct step; otherwise NULL */
    /* For each look its own part: [its items][its queries * group], [its states][the same], and
     * [its states][its queries], the entries over which the softmax runs. */
    struct look_stat *partial, *stats;
    struct sight *sees;
    float *fresh; /* [entries] */
    double *sums; /* [items][2] */
    int queries_max, vectors_max, parts_max;
    int heads_q;
    int kind, group; /* the heads that a launch looks at; the largest group before it is launched */
    const struct attended *attended; /* [layers] */
    struct attended same;            /* without `attended`: the same for all layers */
    float scale, cap;                /* kern_attend_options, times log2(e) */
};

/* Looks at streams with heads of all kinds, one kind after the other. */
void look_all(struct cuda *cuda, const struct look_args &args);
/* Allocates its results. The largest comes last: it grows with the entries, and arguments of a step
 * should not change with it (graph.h). */
void look_room(struct pieces *room, struct look_args *args, const struct look_sizes *sizes);
/* Gives a look its parts of the arrays; its streams have at most `items` chunks together. `group`:
 * the largest; kinds of heads are looked at one after the other, and use the same memory. */
void look_place(struct look *look, int64_t streams, int64_t items, int group,
                struct look_sizes *sizes);
/* The queries of a slot's window; `positions` has room for KERN_WINDOW_MAX, and the caller stages
 * it. */
void look_at_window(const struct slot *slot, int32_t tokens, struct look *look, int32_t *positions);

/* ---- Eviction: evict.cu ---- */

enum { FIELD_KEY, FIELD_POS, FIELD_STREAM, FIELDS };

#define KEY_PROTECTED 0xffffffffu /* above every score; no float has this key */
#define STREAM_MASK   0xfffffu

/* The lowest-ranking entry that is kept, as far as it is known. */
struct cutoff {
    uint32_t value[FIELDS];
    uint32_t wanted; /* number of entries to keep among those that agree with `value` so far */
    uint32_t done;   /* all fields are known */
    uint32_t blocks; /* blocks that have added to the histogram of this pass */
    uint32_t room;   /* the initial value of `wanted` */

    /* Bit r: rank r has reached rank_cap. Such ranks keep `limit` of their own entries, and the
     * others compete for the `open` rest of the allotment; see k_cap. */
    uint32_t capped, limit, open;
};

/* One competition among the entries of a sequence; `scope_blocks` blocks work on each scope. */
struct contest {
    int32_t scope;                    /* enum kern_scope */
    int32_t scopes, scope_blocks;     /* scopes 0: no competition */
    int32_t joint;                    /* other ranks' streams compete, too */
    int64_t first_cutoff, first_bins; /* first_bins: index into `bins`, or into `joint_bins` */
};

/* A sequence to evict from; its subject has the same index. */
struct due {
    struct kern_rule rule;
    int32_t slot, tokens, budget;
    uint32_t least;               /* entries with a lower key are evicted in any case */
    bool remembers;               /* entries store their new score */
    bool measures;                /* the layers' weights are measured now */
    int64_t floor;                /* rule_floor */
    struct contest first, second; /* second: with a floor, once streams have allotments */
    struct contest own; /* the first one without other ranks, used if this rank has been capped */
    int64_t first_part; /* index into the array of parts */
};

struct evict_args {
    struct streams_args streams;
    const struct due *due;
    struct cutoff *cutoffs;
    uint32_t *bins;           /* [scopes of several blocks][BINS], zero before every pass */
    uint32_t *joint_bins;     /* [joint scopes][BINS], likewise */
    struct allot_part *parts; /* [dues][layers + the model's streams] */
    uint32_t *changed;        /* some rank has been capped */
    uint32_t own;         /* bit, in struct cutoff, of the rank that speaks for this rank's heads */
    bool speaks;          /* this rank's entries count where those of all ranks are counted */
    struct chunk *chunks; /* [items], in the order of the list of chunks */
    int32_t *tickets;     /* [MOVES_MAX]: the next chunk of each launch that compacts */
    float cap;
    const struct attended *attended; /* [layers] */
    float *fresh;                    /* [entries]: scores that candidates will store */
    double *sums;                    /* [items][2]: results of LOOK_PREFERENCE */

    /* Redundancy, one number per entry; NULL if no rule needs them. */
    float *norm, *alike;
    unsigned long long *forgiven; /* in units of 2^-32 */
    float *totals;                /* [items][head_dim]: sums of khat over a chunk, of one kind of
                                     heads at a time */
};

/* The scope of a stream. */
static __device__ __forceinline__ int scope_of(const struct contest &c,
                                               const struct stream_state &state) {
    return c.scope == KERN_SCOPE_STREAM  ? state.stream
           : c.scope == KERN_SCOPE_LAYER ? state.place.layer
                                         : 0;
}

/* The cutoff of the first contest. */
static __device__ __forceinline__ const struct cutoff &
first_cutoff(const struct evict_args &a, const struct due &d, const struct stream_state &state) {
    int scope = scope_of(d.first, state);
    const struct cutoff &cutoff = a.cutoffs[d.first.first_cutoff + scope];
    return cutoff.capped & a.own ? a.cutoffs[d.own.first_cutoff + scope] : cutoff;
}

static __device__ __forceinline__ const struct cutoff &
final_cutoff(const struct evict_args &a, const struct due &d, const struct stream_state &state) {
    if (d.second.scopes == 0) return first_cutoff(a, d, state);
    return a.cutoffs[d.second.first_cutoff + state.stream];
}

static __device__ __forceinline__ uint32_t rank_field(const struct pages &p, int64_t side,
                                                      int stream, int field) {
    if (field == FIELD_KEY) return p.keys[side];
    if (field == FIELD_POS) return (uint32_t)p.pos[side];
    return STREAM_MASK - (uint32_t)pages_model_stream(p, stream);
}

/* Compares the entry's first `fields` fields with the cutoff's: -1, 0 or 1. */
static __device__ __forceinline__ int compare_rank(const struct pages &p, int64_t side, int stream,
                                                   const struct cutoff &cutoff, int fields) {
    for (int f = 0; f < fields; f++) {
        uint32_t mine = rank_field(p, side, stream, f);
        if (mine != cutoff.value[f]) return mine > cutoff.value[f] ? 1 : -1;
    }
    return 0;
}

static __device__ __forceinline__ bool is_kept(const struct pages &p, int64_t side, int stream,
                                               const struct cutoff &cutoff, uint32_t least) {
    return p.keys[side] >= least && compare_rank(p, side, stream, cutoff, FIELDS) >= 0;
}

/* ---- Compaction: compact.cu ---- */

/* A chunk of a stream, once it is known which entries are kept. */
struct chunk {
    uint32_t kept[PRODUCT_KEYS / 32]; /* bit i % 32 of word i / 32: entry i of the chunk is kept */
    int32_t before;                   /* kept entries of the stream before the chunk */
    uint32_t taken; /* in so many launches the chunk's entries have been read and may be overwritten
                     */
};
#define MOVES_MAX (2 * KINDS_MAX) /* launches that move entries */

void compact_room(struct pieces *room, struct evict_args *args); /* allocates its results */
/* Finds the kept entries of each chunk, kept and lead of the states. Adds the missing pages to
 * pages_state.need. */
void compact_count(struct cuda *cuda, const struct evict_args &args);
/* Called after compact_count if there are enough pages: makes pages that will be written the
 * stream's own, for one sequence. */
void compact_own(struct cuda *cuda, const struct evict_args &args);
/* Closes the gaps and frees pages. */
void compact_all(struct cuda *cuda, const struct evict_args &args);

/* ---- Redundancy: redundancy.cu ---- */

/* R of the candidates of sequences whose rule has redundancy -> alike. */
void redundancy_find(struct cuda *cuda, const struct evict_args &args);

/* ---- Allotments: allot.cu ---- */

/* Measures the layers' weights where needed, and computes the allotments of the first contest. */
void allot_layers(struct cuda *cuda, const struct evict_args &args, int count, bool preference);
/* Counts each stream's entries among the best of its scope; every rank learns all counts. */
void allot_count(struct cuda *cuda, const struct evict_args &args);
/* Computes the allotments of streams from these counts. */
void allot_floor(struct cuda *cuda, const struct evict_args &args, int count);

#endif
