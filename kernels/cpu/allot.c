/* Splits a sequence's total over layers and streams: by equal parts, by a fixed pyramid, or by
 * weights measured at the first eviction. Every rank computes the same split from the facts of all
 * ranks. */
#include <math.h>

#include "base/check.h"
#include "kernels/cpu/evict.h"

/* ---- Weights of layers ---- */

/* Measures the stream and stores the result with its plan, from which evict_tell sends it. */
static void measure_preference(void *arg, int stream, int worker) {
    const struct evict_job *job = arg;
    struct cpu_evict_stream *plan = &job->cache->evict[stream];
    struct cpu_work work = cpu_cache_work(job->cache, worker);
    struct evict_preference found = evict_preference(job, stream, plan->candidates, &work);
    plan->measured[0] = found.entropy;
    plan->measured[1] = found.variance;
}

/* Measures the unbiased variance of the entries' accumulated attention. */
static void measure_density(void *arg, int stream, int worker) {
    (void)worker;
    const struct evict_job *job = arg;
    struct cpu_stream view = evict_stream(job, stream);
    int slots = view.layer->page_slots;
    double mean = 0, squares = 0;
    for (int32_t i = 0; i < view.length; i++) {
        double x = cpu_cache_score(job->cache, view.pages[i / slots])[i % slots];
        double delta = x - mean;
        mean += delta / (i + 1);
        squares += delta * (x - mean);
    }
    job->cache->evict[stream].measured[0] = view.length > 1 ? squares / (view.length - 1) : 0;
}

/* ---- Facts of all ranks ---- */

struct cpu_evict_fact *evict_fact(const struct evict_job *job, int layer, int head) {
    const struct cpu_cache *cache = job->cache;
    const struct cpu_layer *l = &cache->layers[layer];
    int owner = shard_owner(cache->comm->ranks, l->heads_model, head);
    CHECK(layer < cache->options.layers && owner < cache->comm->ranks);
    return &cache->facts[owner * cache->streams + l->first + head % l->heads_kv];
}

int evict_tell(const struct evict_job *job) {
    const struct cpu_cache *cache = job->cache;
    struct cpu_evict_fact *own = cache->facts + (ptrdiff_t)cache->comm->rank * cache->streams;
    for (int stream = 0; stream < cache->streams; stream++) {
        const struct cpu_evict_stream *plan = &cache->evict[stream];
        own[stream] = (struct cpu_evict_fact){
            .length = (int64_t)(plan[1].first - plan->first),
            .fixed = plan->fixed,
            .best = plan->best,
            .measured = {plan->measured[0], plan->measured[1]},
        };
    }
    return cache->comm->ops->all_gather(cache->comm, cache->facts,
                                        (size_t)cache->streams * sizeof *cache->facts);
}

/* ---- Weights of layers, from what was measured ---- */

static double preference(const struct evict_job *job, int layer) {
    const struct kern_rule *rule = job->due->rule;
    double entropy = 0, variance = 0;
    for (int head = 0; head < job->cache->layers[layer].heads_model; head++) {
        entropy += evict_fact(job, layer, head)->measured[0];
        variance += evict_fact(job, layer, head)->measured[1];
    }
    return pow(entropy, 1 / (double)rule->tau1) * pow(variance, 1 / (double)rule->tau2);
}

static double density(const struct evict_job *job, int layer) {
    int heads = job->cache->layers[layer].heads_model;
    double low = evict_fact(job, layer, 0)->measured[0], high = low, sum = 0;
    for (int i = 0; i < heads; i++) {
        low = fmin(low, evict_fact(job, layer, i)->measured[0]);
        high = fmax(high, evict_fact(job, layer, i)->measured[0]);
    }
    for (int i = 0; i < heads; i++)
        sum += (evict_fact(job, layer, i)->measured[0] - low) / (high - low + 1e-6);
    return exp(-sum / heads); /* normalised when the total is split */
}

/* Linear with mean 1; the last layer's weight is 1 / beta. */
static double pyramid(const struct evict_job *job, int layer) {
    int last = job->cache->options.layers - 1;
    double low = 1 / (double)job->due->rule->pyramid_beta;
    return last > 0 ? 2 - low - (2 - 2 * low) * layer / last : 1;
}

int evict_measure(const struct evict_job *job, evict_each *each) {
    struct cpu_cache *cache = job->cache;
    enum kern_layers by = job->due->rule->layers;
    float *weights = cpu_cache_weights(cache, job->due->slot);
    if (cache->slots[job->due->slot].measured) return 0;
    if (by == KERN_LAYERS_PREFERENCE) each(job, measure_preference);
    if (by == KERN_LAYERS_DENSITY) each(job, measure_density);
    int rc = evict_tell(job);
    if (rc) return rc;
    for (int layer = 0; layer < cache->options.layers; layer++) {
        double weight = by == KERN_LAYERS_PREFERENCE ? preference(job, layer)
                        : by == KERN_LAYERS_DENSITY  ? density(job, layer)
                        : by == KERN_LAYERS_PYRAMID  ? pyramid(job, layer)
                                                     : 1;
        weights[layer] = (float)weight;
    }
    return 0;
}

/* ---- Allotments of layers and streams ---- */

/* Protected entries are kept in place; the rest of the total is split by weight. */
static void split_layers(const struct evict_job *job, struct allot_part *parts) {
    const struct cpu_cache *cache = job->cache;
    int layers = cache->options.layers;
    const float *weights = cpu_cache_weights(cache, job->due->slot);
    int64_t total = (int64_t)cache->streams_model * job->due->budget;
    for (int layer = 0; layer < layers; layer++) {
        const int heads = cache->layers[layer].heads_model;
        int64_t fixed = 0, held = 0;
        for (int i = 0; i < heads; i++) {
            fixed += evict_fact(job, layer, i)->fixed;
            held += evict_fact(job, layer, i)->length;
        }
        parts[layer] = (struct allot_part){.weight = (double)weights[layer], .most = held - fixed};
        total -= fixed;
    }
    allot_split(parts, layers, total);
    for (int layer = 0; layer < layers; layer++) {
        CHECK(parts[layer].part >= 0 && parts[layer].part <= parts[layer].most);
        for (int i = 0; i < cache->layers[layer].heads_model; i++)
            parts[layer].part += evict_fact(job, layer, i)->fixed;
    }
}

static void split_heads(const struct evict_job *job, int layer, int64_t room) {
    const struct cpu_cache *cache = job->cache;
    const struct cpu_layer *l = &cache->layers[layer];
    struct allot_part *parts = cache->parts + cache->options.layers;
    for (int i = 0; i < l->heads_model; i++) {
        const struct cpu_evict_fact *fact = evict_fact(job, layer, i);
        parts[i] = (struct allot_part){.weight = 1, .most = fact->length, .least = fact->fixed};
    }
    allot_split(parts, l->heads_model, room);
    for (int i = 0; i < l->heads_kv; i++) {
        const struct allot_part *part = &parts[l->shard.first + i];
        CHECK(part->part >= part->least && part->part <= part->most);
        cache->evict[l->first + i].allotment = part->part;
    }
}

int evict_allot(const struct evict_job *job) {
    struct cpu_cache *cache = job->cache;
    const struct kern_rule *rule = job->due->rule;
    int layers = cache->options.layers;
    bool one = rule->scope == KERN_SCOPE_STREAM, uniform = rule->layers == KERN_LAYERS_UNIFORM;
    int rc = one && uniform ? 0 : evict_tell(job);
    if (rc) return rc;
    if (rule->scope == KERN_SCOPE_SEQUENCE) {
        cache->scopes[0].total = (int64_t)cache->streams_model * job->due->budget;
        return 0;
    }
    if (uniform) {
        for (int i = 0; one && i < cache->streams; i++)
            cache->evict[i].allotment = job->due->budget;
        for (int i = 0; !one && i < layers; i++)
            cache->scopes[i].total = (int64_t)cache->layers[i].heads_model * job->due->budget;
        return 0;
    }
    split_layers(job, cache->parts);
    for (int layer = 0; layer < layers; layer++)
        if (rule->scope == KERN_SCOPE_LAYER)
            cache->scopes[layer].total = cache->parts[layer].part;
        else
            split_heads(job, layer, cache->parts[layer].part);
    return 0;
}
