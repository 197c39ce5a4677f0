/* Declarations shared by the files that open an engine: open.c (the parts, in their order),
 * open_cache.c (the policy and the pool of pages), open_info.c (what an opened engine, or a check,
 * says of itself). No other file includes this. */
#ifndef KEEPD_ENGINE_OPEN_H
#define KEEPD_ENGINE_OPEN_H

#include "engine/engine_int.h"

/* Constant facts come from the first replica: all replicas have the same model and the same kind of
 * backend. */
static inline const struct model *open_model_of(const struct engine *e) {
    return e->replicas[0].model;
}

static inline const struct kern_ops *open_ops_of(const struct engine *e) {
    return e->replicas[0].kern->ops;
}

static inline int open_ranks(const struct engine *e) {
    return e->options.tensor_parallel_size < 1 ? 1 : e->options.tensor_parallel_size;
}

/* Chooses policy, dtype and pages of every replica's cache, and fills in so->kv, so->shape and
 * so->pages_total. */
int open_plan_cache(struct engine *e, struct sched_options *so, enum kern_dtype *dtype,
                    struct fault *fault);
/* Opens one replica's cache as it was planned. */
int open_pool(const struct engine *e, struct replica *replica, enum kern_dtype dtype,
              const struct sched_options *so, struct fault *fault);

/* Fills in e->info. */
void open_fill_info(struct engine *e, const struct sched_options *so);
/* Fills in what a check found, and e->info. */
void open_fill_found(struct engine *e, const struct sched_options *so, struct engine_found *found);

#endif
