/* What the stages of an eviction share on the device. Stages run in the order of
 * kernels/cpu/evict.h, over one or several sequences at once:
 *
 *   streams    k_streams, k_plan         lengths, candidates, the list of chunks (streams.cu)
 *   observe    k_look_*                  what the window's queries say (observe.cu)
 *   redundancy k_key_norms, k_forgive    how much keys resemble others (redundancy.cu)
 *   score      k_score                   one key per entry (evict.cu)
 *   share      k_share*                  places of layers and streams (share.cu)
 *   select     k_select                  the lowest rank that is kept (evict.cu)
 *   merge      k_merge_*                 evicted entries into kept ones (merge.cu)
 *   join       k_class_*                 or into their classes (classes.cu)
 *   compact    k_compact                 closing the gaps (compact.cu)
 *
 * A subject is a sequence that is looked at: all its streams when it evicts, those of one layer
 * when a step adds up attention. Work that reads keys is cut into chunks of PRODUCT_KEYS entries
 * counted from the stream's start, listed on the device, and taken by number: unequal streams make
 * equal work, and a sum over chunks is made in their order, so that it depends on the stream alone.
 * What touches only numbers of an entry (4 to 12 bytes where a key has 128 to 512) is a block per
 * stream. */
#ifndef KEEPD_KERNELS_CUDA_EVICT_CUH
#define KEEPD_KERNELS_CUDA_EVICT_CUH

#include "kernels/cuda/internal.h"
#include "kernels/cuda/keys.cuh"
#include "kernels/share.h"

/* Parts of a room, one after the other; without a base only their size is found. */
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

/* ---- Streams: streams.cu ----------------------------------------------------------------------
 */

struct subject {
    int32_t slot, sinks;
    int32_t limit;        /* entries with pos below it are candidates */
    int32_t stream_first; /* of the sequence's streams, plus the launch's own offset */
    int32_t stream_count;
    int32_t state_first; /* of its first stream, in the array of states */
};

struct stream_state {
    int32_t subject, stream;
    int32_t length, candidates, fixed;
    int32_t work; /* items of the list: its chunks, or what a stage asks for */
    int32_t item; /* the first of them */
    int32_t lead; /* entries before the first one that goes; before that is known, all */
    int32_t kept;
    int32_t gone;       /* evicted entries that look for one to merge with */
    int32_t best;       /* entries among the best of its pool */
    int64_t first;      /* its first entry in arrays of one number per entry */
    double measured[2]; /* for the weights of layers */
};

struct item {
    int32_t state;
    int32_t chunk;
};

struct streams_args {
    struct pages pages;
    const struct subject *subjects;
    struct stream_state *states; /* of this rank's streams */
    struct stream_state *all;    /* [ranks][state_count], of which they are a part; see tell_all */
    int32_t ranks, rank;
    struct item *items;
    int32_t *item_count;
    int32_t stream_offset; /* added to stream_first: a layer's streams */
    int32_t state_count;
    int64_t items_max, entries_max;
};

/* Fills the states. `most`: streams of the largest subject. */
void streams_find(struct cuda *cuda, const struct streams_args &args, int subjects, int most);
/* All ranks' states to every rank: what is shared and cut between streams of several ranks is
 * decided by each of them from the same numbers. */
void streams_tell(struct cuda *cuda, const struct streams_args &args);
/* Lists the chunks of all states, or the work that they have, and gives each its first entry. */
void streams_plan(struct cuda *cuda, const struct streams_args &args);
void streams_plan_work(struct cuda *cuda, const struct streams_args &args);
void streams_room(struct pieces *room, struct streams_args *args); /* places for its results */
/* Chunks that streams with so many entries can have together. */
int64_t streams_items_max(int64_t streams, int64_t entries, int64_t longest);

/* What is known of a stream of the model: `first` is the state of its subject's first stream. */
static __device__ __forceinline__ const struct stream_state &
model_state(const struct streams_args &a, int first, int layer, int head) {
    const struct pages &p = a.pages;
    int64_t owner = shard_owner(a.ranks, p.heads_model, head);
    return a.all[owner * a.state_count + first + layer * p.heads_kv + head % p.heads_kv];
}

/* ---- Attention: observe.cu --------------------------------------------------------------------
 */

enum look_kind {
    LOOK_NONE,       /* this subject is not looked at */
    LOOK_WINDOW,     /* candidates' scores -> fresh */
    LOOK_PREFERENCE, /* CAKE's two sums -> sums */
    LOOK_MASS        /* added to the entries' scores */
};

/* What is looked at for one subject. The query at position pos lies at place (pos - origin) %
 * modulus of its queries. */
struct look {
    struct kern_observe observe;
    int32_t kind;
    int32_t query_count, origin, modulus;
    bool classes, positions;  /* entries have members (kern.h, struct kern_classes) */
    int32_t row;              /* of the step, of the first query; LOOK_MASS */
    const uint16_t *queries;  /* [layer][place][heads_q * head_dim] */
    int64_t layer_stride;     /* in elements; 0: queries of one layer only */
    const int32_t *query_pos; /* [query_count], ascending; NULL: from origin on */
};

/* What a query sees: entries [low, high), and of their members those at positions (least, pos]. */
struct sight {
    int32_t low, high, pos, least;
};

/* Of the softmax over a row (or a combination of rows): largest logit, 1 / sum. */
struct look_stat {
    float most, scale;
};

struct look_args {
    struct streams_args streams;
    const struct look *looks;
    struct look_stat *partial; /* [items][vectors] */
    struct look_stat *stats;   /* [states][vectors] */
    struct sight *sees;        /* [states][queries]: what the softmax runs over */
    float *fresh;              /* [entries] */
    double *sums;              /* [items][2] */
    float *out;                /* LOOK_MASS with classes: attention's answers, of all rows */
    int queries_max, vectors_max, parts_max;
    int heads_q, group;
    int query, queries;     /* of a group, those that this rank answers */
    const int32_t *windows; /* [layers]: keys so far behind a query are masked; 0: none */
    int window;             /* without those, of all layers */
    bool plain, classes;    /* are there looks of either kind? */
    float scale;            /* of logits, times log2(e) */
};

void look_all(struct cuda *cuda, const struct look_args &args);
/* Attention's answers where entries have classes, with the sums that look_all has left. */
void classes_attend(struct cuda *cuda, const struct look_args &args);
void look_room(struct pieces *room, struct look_args *args); /* places for its results */
/* Host, [layers]: how far each layer's attention last saw, which queries that are asked again do,
 * too; NULL: none has had a window. */
const int32_t *look_windows(const struct cuda *cuda);
/* The queries of a slot's window; `positions` has room for KERN_WINDOW_MAX, to be staged. */
void look_at_window(const struct slot *slot, int32_t tokens, struct look *look, int32_t *positions);

/* ---- Eviction: evict.cu -----------------------------------------------------------------------
 */

enum { FIELD_KEY, FIELD_POS, FIELD_STREAM, FIELDS };

#define KEY_PROTECTED 0xffffffffu /* above every score; no float has this key */
#define STREAM_MASK   0xfffffu

/* The lowest rank that is kept, as far as it is known. */
struct cut {
    uint32_t value[FIELDS];
    uint32_t wanted; /* of the entries that agree with `value` so far, how many are kept */
    uint32_t done;   /* all of them */
    uint32_t blocks; /* that have added to the histogram of this pass */
    uint32_t room;   /* what `wanted` was */

    /* Ranks that have reached rank_cap: bit r. They keep `limit` of their own, and the others
     * compete for `open` places; see cap_groups. */
    uint32_t capped, limit, open;
};

/* How the entries of one sequence compete, once; blocks per group. */
struct contest {
    int32_t group_streams, groups, group_blocks; /* groups 0: not at all */
    int32_t joint;                               /* with those of other ranks */
    int64_t first_cut, first_bins;               /* bins: of `bins`, or `joint_bins` */
};

/* One sequence that evicts, beside its subject. */
struct due {
    struct kern_rule rule;
    int32_t slot, tokens, keep;
    uint32_t least;               /* entries with a lower key go in any case */
    bool remembers;               /* entries keep their new score */
    bool measures;                /* the layers' weights are taken now */
    int32_t members_max;          /* kern_members_max */
    struct contest first, second; /* second: with a floor, when streams know their places */
    struct contest reach;         /* with classes: who may join one */
    struct contest own;           /* the first without other ranks: if this one has been capped */
    int64_t first_part;           /* in the array of parts */
};

struct evict_args {
    struct streams_args streams;
    const struct due *due;
    struct cut *cuts;
    uint32_t *bins;           /* [groups of several blocks][BINS], zero before every pass */
    uint32_t *joint_bins;     /* [joint groups][BINS], likewise */
    struct share_part *parts; /* [dues][layers + the model's streams] */
    uint32_t *changed;        /* ranks have been capped */
    uint32_t own;         /* this rank's bit in struct cut: of the one that speaks for its heads */
    bool speaks;          /* its entries count, where those of all ranks are counted */
    struct chunk *chunks; /* [items], of the list of chunks */
    int32_t *ticket;      /* of compaction: the next of them */
    float cap;
    float *fresh; /* [entries]: what candidates will remember */
    double *sums; /* [items][2]: of LOOK_PREFERENCE */

    /* Redundancy and merging, one per entry; nulls when no rule wants them. */
    float *norm, *alike;
    unsigned long long *forgiven; /* in units of 2^-32 */
    float *totals;                /* [items][head_dim]: sums of khat over a chunk */
    int32_t *links;               /* see merge.cu */
    int32_t *gone;                /* evicted entries of a stream that merge, ascending */
    int32_t *target;              /* theirs */

    /* Classes, one sequence at a time; see classes.cu. */
    float *value_norm;               /* [entries] lengths of values; norm: of keys */
    int32_t *joined, *first, *place; /* [entries] */
    struct member *old;              /* [old_max]: the members as they were */
    unsigned long long *old_used;
    int64_t old_max;
};

/* Of the first contest. */
static __device__ __forceinline__ const struct cut &first_cut(const struct evict_args &a,
                                                              const struct due &d, int stream) {
    int group = stream / d.first.group_streams;
    const struct cut &cut = a.cuts[d.first.first_cut + group];
    return cut.capped & a.own ? a.cuts[d.own.first_cut + group] : cut;
}

static __device__ __forceinline__ const struct cut &final_cut(const struct evict_args &a,
                                                              const struct due &d, int stream) {
    if (d.second.groups == 0) return first_cut(a, d, stream);
    return a.cuts[d.second.first_cut + stream / d.second.group_streams];
}

static __device__ __forceinline__ uint32_t rank_field(const struct pages &p, int64_t side,
                                                      int stream, int field) {
    if (field == FIELD_KEY) return p.keys[side];
    if (field == FIELD_POS) return (uint32_t)p.pos[side];
    return STREAM_MASK - (uint32_t)pages_model_stream(p, stream);
}

/* -1, 0, 1: how the entry's first `fields` fields compare with the cut's. */
static __device__ __forceinline__ int compare_rank(const struct pages &p, int64_t side, int stream,
                                                   const struct cut &cut, int fields) {
    for (int f = 0; f < fields; f++) {
        uint32_t mine = rank_field(p, side, stream, f);
        if (mine != cut.value[f]) return mine > cut.value[f] ? 1 : -1;
    }
    return 0;
}

static __device__ __forceinline__ bool is_kept(const struct pages &p, int64_t side, int stream,
                                               const struct cut &cut, uint32_t least) {
    return p.keys[side] >= least && compare_rank(p, side, stream, cut, FIELDS) >= 0;
}

/* ---- Compaction: compact.cu -------------------------------------------------------------------
 */

/* A chunk of a stream, when it is known who stays. */
struct chunk {
    uint32_t kept[PRODUCT_KEYS / 32]; /* bit i % 32 of word i / 32: entry i of the chunk stays */
    int32_t before;                   /* entries of the stream that stay, before it */
    uint32_t taken;                   /* nobody reads its entries where they lay any more */
};

void compact_room(struct pieces *room, struct evict_args *args); /* places for its results */
/* Who stays of each chunk, kept and lead of the states, how many may join classes. Adds the pages
 * that are missing to pages_state.need. The list is that of chunks. */
void compact_count(struct cuda *cuda, const struct evict_args &args);
/* Then, if there are enough: what is written becomes the stream's own, of one sequence. */
void compact_own(struct cuda *cuda, const struct evict_args &args);
/* Closes the gaps and gives pages back; the list is that of chunks again. */
void compact_all(struct cuda *cuda, const struct evict_args &args);

/* ---- Redundancy: redundancy.cu ----------------------------------------------------------------
 */

/* R of the candidates of sequences that judge redundancy -> alike. */
void redundancy_find(struct cuda *cuda, const struct evict_args &args);
/* 1 / |k| of every entry of sequences that merge -> norm. */
void merge_norms(struct cuda *cuda, const struct evict_args &args);
/* ---- Shares: share.cu -------------------------------------------------------------------------
 */

/* Weights of layers where they are taken now, and the places of what competes first. */
void share_layers(struct cuda *cuda, const struct evict_args &args, int count, bool preference,
                  bool density);
/* How many of each stream's entries are among the best of its pool; every rank knows of all. */
void share_count(struct cuda *cuda, const struct evict_args &args);
/* The places of streams, from that. */
void share_floor(struct cuda *cuda, const struct evict_args &args, int count);

/* ---- Merging: merge.cu ------------------------------------------------------------------------
 */

/* When it is known what goes and all pages are the streams' own. */
void merge_all(struct cuda *cuda, const struct evict_args &args);
/* Its stages that classes share: who goes, and lists of whom each target takes in. */
#define MERGE_STAYS  (-2) /* links: nobody joins it */
#define MERGE_NOBODY (-1)
void merge_gone(struct cuda *cuda, const struct evict_args &args);
void merge_link(struct cuda *cuda, const struct evict_args &args);

/* The more alike; equal ones: the newer. NaN is nobody's. */
struct likeness {
    float alike;
    int32_t entry;
};

static __device__ __forceinline__ struct likeness better(struct likeness a, struct likeness b) {
    if (b.entry < 0) return a;
    if (a.entry < 0) return b;
    if (a.alike != b.alike) return a.alike > b.alike ? a : b;
    return a.entry > b.entry ? a : b;
}

/* ---- Classes: classes.cu ----------------------------------------------------------------------
 */

#define JOIN_ROWS (PRODUCT_ROWS / 2) /* evicted entries that look for a class at a time */

/* Members a stream can have when its evicted entries have joined. */
static __device__ __forceinline__ int classes_most(const struct due &d,
                                                   const struct stream_state &state, int members) {
    int64_t all = (int64_t)members + state.length - state.kept;
    int64_t most = all < d.members_max ? all : d.members_max;
    return most > members ? (int)most : members;
}

/* Pages for as many: counted by compact_count, taken by the launch. */
void classes_own(struct cuda *cuda, const struct evict_args &args);
/* When it is known what goes and who reaches a class, and all pages are the streams' own. */
void classes_join(struct cuda *cuda, const struct evict_args &args);

#endif
