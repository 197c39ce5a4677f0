/* Counts requests as they finish and renders /metrics. The Prometheus text format wants all samples
 * of a metric together, below one head; so each replica's samples are appended to one buffer per
 * metric, and the buffers are joined at the end. Most metrics are rows of tables: a name, a help
 * text and a member of struct engine_status or of its counters. */
#include "server/stats.h"

#include <inttypes.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/mem.h"

/* --- counting --- */

static const double ttft_bounds[] = {.001, .005, .01, .02, .04, .06, .08, .1, .25, .5,  .75,
                                     1,    2.5,  5,   7.5, 10,  20,  40,  80, 160, 640, 2560};
static const double token_bounds[] = {.01, .025, .05, .075, .1,  .15, .2, .3, .4, .5,
                                      .75, 1,    2.5, 5,    7.5, 10,  20, 40, 80};
static const double request_bounds[] = {.3, .5, .8, 1,  1.5, 2,   2.5, 5,   10,   15,  20,
                                        30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680};
static const double n_bounds[] = {1, 2, 5, 10, 20};
static const double preemption_bounds[] = {0, 1, 2, 5, 10};

#define OPEN(hist, bounds) hist_open((hist), (bounds), (int)(sizeof(bounds) / sizeof(*(bounds))))

static int fill_length_bounds(double *bounds, int longest) {
    static const int steps[] = {1, 2, 5};
    int count = 0;
    for (int64_t decade = 1; count < HIST_MAX_BOUNDS; decade *= 10)
        for (int i = 0; i < 3 && count < HIST_MAX_BOUNDS; i++) {
            if (decade * steps[i] > longest) return count;
            bounds[count++] = (double)(decade * steps[i]);
        }
    return count;
}

static void open_requests(struct stats_requests *of, const double *lengths, int length_count) {
    OPEN(&of->ttft, ttft_bounds);
    OPEN(&of->inter_token, token_bounds);
    OPEN(&of->per_output_token, token_bounds);
    OPEN(&of->e2e, request_bounds);
    OPEN(&of->queue, request_bounds);
    OPEN(&of->inference, request_bounds);
    OPEN(&of->prefill, request_bounds);
    OPEN(&of->decode, request_bounds);
    OPEN(&of->params_n, n_bounds);
    OPEN(&of->preemptions, preemption_bounds);
    hist_open(&of->prompt_tokens, lengths, length_count);
    hist_open(&of->generation_tokens, lengths, length_count);
    hist_open(&of->max_tokens, lengths, length_count);
    hist_open(&of->computed_tokens, lengths, length_count);
}

void stats_open(struct stats *stats, int replicas, int max_model_len) {
    *stats = (struct stats){.replicas = mem_must_alloc((size_t)replicas, sizeof *stats->replicas),
                            .replica_count = replicas};
    int count = fill_length_bounds(stats->length_bounds, max_model_len);
    for (int i = 0; i < replicas; i++)
        open_requests(&stats->replicas[i], stats->length_bounds, count);
}

void stats_close(struct stats *stats) {
    mem_free(stats->replicas);
    *stats = (struct stats){0};
}

static double seconds_between(int64_t from_ns, int64_t to_ns) {
    return to_ns > from_ns ? (double)(to_ns - from_ns) / 1e9 : 0;
}

void stats_tokens(struct stats *stats, const struct engine_job *job, uint32_t count,
                  int64_t received_ns, int64_t last_ns, int64_t now_ns) {
    struct stats_requests *of = &stats->replicas[job->replica];
    if (!count) return;
    if (!last_ns) { /* tokens that arrive together with the first one came after it */
        hist_add(&of->ttft, seconds_between(received_ns, now_ns));
        last_ns = job->first_token_ns;
        count--;
    }
    for (uint32_t i = 0; i < count; i++)
        hist_add(&of->inter_token, seconds_between(last_ns, now_ns) / count);
}

static void count_times(struct stats_requests *of, const struct engine_job *job,
                        int64_t received_ns, uint32_t tokens) {
    hist_add(&of->e2e, seconds_between(received_ns, job->finished_ns));
    if (!job->admitted_ns) return;
    hist_add(&of->queue, seconds_between(job->queued_ns, job->admitted_ns));
    hist_add(&of->inference, seconds_between(job->admitted_ns, job->finished_ns));
    if (!job->first_token_ns) return;
    hist_add(&of->prefill, seconds_between(job->admitted_ns, job->first_token_ns));
    hist_add(&of->decode, seconds_between(job->first_token_ns, job->finished_ns));
    if (tokens > 1)
        hist_add(&of->per_output_token,
                 seconds_between(job->first_token_ns, job->finished_ns) / (tokens - 1));
}

static uint32_t answer_tokens(const struct engine_job *job) {
    uint32_t tokens = 0;
    for (int i = 0; i < job->choice_count; i++)
        tokens += (uint32_t)atomic_load_explicit(&job->choice[i].token_count, memory_order_acquire);
    return tokens;
}

void stats_submitted(struct stats *stats, int64_t now_ns) {
    if (stats->unfinished++ == 0) stats->busy_since_ns = now_ns;
}

/* Counts the time since the last finished request. Time without any request says nothing about how
 * fast requests finish. */
static void count_interval(struct stats *stats, int64_t now_ns) {
    bool first = stats->last_finish_ns == 0;
    int64_t since =
        stats->last_finish_ns > stats->busy_since_ns ? stats->last_finish_ns : stats->busy_since_ns;
    stats->last_finish_ns = now_ns;
    stats->unfinished--;
    if (!first)
        stats->finish_interval += (seconds_between(since, now_ns) - stats->finish_interval) / 8;
}

void stats_finished(struct stats *stats, const struct engine_job *job, int64_t received_ns) {
    struct stats_requests *of = &stats->replicas[job->replica];
    const struct engine_choice *choice = &job->choice[0];
    int finish = atomic_load_explicit(&choice->finish, memory_order_acquire);
    uint32_t tokens = answer_tokens(job);
    if (finish < 0 || finish >= ENGINE_FINISH_COUNT) finish = ENGINE_FINISH_ERROR;
    of->finished[finish]++;
    count_times(of, job, received_ns, tokens);
    hist_add(&of->prompt_tokens, job->request.prompt_count);
    hist_add(&of->generation_tokens, tokens);
    hist_add(&of->max_tokens, job->request.max_tokens);
    hist_add(&of->computed_tokens, job->request.prompt_count - job->cached_tokens);
    hist_add(&of->params_n, job->choice_count);
    hist_add(&of->preemptions, 0); /* reservations are exact */
    count_interval(stats, job->finished_ns);
}

int stats_retry_ms(const struct stats *stats) {
    double ms = stats->finish_interval * 1000;
    return ms < 100 ? 100 : ms > 30000 ? 30000 : (int)ms;
}

/* --- writing --- */

#define FAMILIES_MAX 128
#define FAMILY_BYTES ((size_t)1 << 20)

/* Writes metrics. The text format wants all samples of a metric together, while each replica is
 * written as a whole. So every metric collects its samples, and all are written at the end. */
struct writer {
    struct buf labels; /* model_name="...",engine="0" */
    bool first; /* the first replica opens the metrics; the others find them in the same order */
    int family_count;
    struct buf families[FAMILIES_MAX];
    struct buf *out; /* the metric that is written */
};

static void write_head(struct writer *w, const char *name, const char *type, const char *help) {
    CHECK(w->family_count < FAMILIES_MAX);
    w->out = &w->families[w->family_count++];
    if (!w->first) return;
    buf_open(w->out, FAMILY_BYTES);
    buf_fmt(w->out, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

static void write_sample_value(struct buf *out, double value) {
    if (value == floor(value) && fabs(value) < 1e15)
        buf_fmt(out, " %.0f\n", value);
    else
        buf_fmt(out, " %.9g\n", value);
}

/* Writes a sample. `extra` is NULL or more labels, with their quotes. */
static void write_sample(struct writer *w, const char *name, const char *extra, double value) {
    buf_fmt(w->out, "%s{%s%s%s}", name, w->labels.data, extra ? "," : "", extra ? extra : "");
    write_sample_value(w->out, value);
}

static void write_single(struct writer *w, const char *name, const char *type, const char *help,
                         double value) {
    write_head(w, name, type, help);
    write_sample(w, name, NULL, value);
}

static void write_hist(struct writer *w, const char *name, const char *help,
                       const struct hist *hist) {
    uint64_t total = 0;
    write_head(w, name, "histogram", help);
    for (int i = 0; i < hist->bound_count; i++) {
        total += hist->counts[i];
        buf_fmt(w->out, "%s_bucket{%s,le=\"%.9g\"} %" PRIu64 "\n", name, w->labels.data,
                hist->bounds[i], total);
    }
    total = hist_count(hist);
    buf_fmt(w->out, "%s_bucket{%s,le=\"+Inf\"} %" PRIu64 "\n", name, w->labels.data, total);
    buf_fmt(w->out, "%s_sum{%s}", name, w->labels.data);
    write_sample_value(w->out, hist->sum);
    buf_fmt(w->out, "%s_count{%s} %" PRIu64 "\n", name, w->labels.data, total);
}

/* Writes a label, escaping the three characters that its value may not have. */
static void write_label(struct buf *out, const char *name, const char *value) {
    buf_fmt(out, "%s=\"", name);
    for (; *value; value++) {
        if (*value == '\n')
            buf_str(out, "\\n");
        else if (*value == '"' || *value == '\\')
            buf_fmt(out, "\\%c", *value);
        else
            buf_char(out, *value);
    }
    buf_char(out, '"');
}

static void write_requests(struct writer *w, const struct engine_status *s) {
    write_single(w, "vllm:num_requests_running", "gauge", "Requests in the running batch.",
                 s->running);
    write_single(w, "vllm:num_requests_waiting", "gauge", "Requests waiting for admission.",
                 s->waiting);
    write_head(w, "vllm:num_requests_waiting_by_reason", "gauge", "Waiting requests by reason.");
    write_sample(w, "vllm:num_requests_waiting_by_reason", "reason=\"capacity\"", s->waiting);
    write_sample(w, "vllm:num_requests_waiting_by_reason", "reason=\"deferred\"", 0);
}

/* Returns the share of the pool that is reserved. Routers read this as load, so it counts what
 * admission counts. Retained conversations do not count, because they give way to new requests. */
double stats_cache_usage(const struct engine_status *s) {
    return s->pages_total > 0 ? (double)s->pages_reserved / (double)s->pages_total : 0;
}

static void write_cache(struct writer *w, const struct engine_info *info,
                        const struct engine_status *s) {
    struct buf labels;
    write_single(w, "vllm:kv_cache_usage_perc", "gauge",
                 "Share of the page pool that running requests reserve, 0 to 1.",
                 stats_cache_usage(s));
    write_single(w, "vllm:gpu_cache_usage_perc", "gauge", "Older name of kv_cache_usage_perc.",
                 stats_cache_usage(s));
    write_head(w, "vllm:cache_config_info", "gauge", "Facts about the cache; always 1.");
    if (info) {
        buf_open(&labels, 1024);
        buf_fmt(&labels, "block_size=\"%d\",num_gpu_blocks=\"%" PRId64 "\",", info->page_slots,
                s->pages_total);
        write_label(&labels, "cache_dtype", info->kv_dtype);
        write_sample(w, "vllm:cache_config_info", labels.data, 1);
        buf_close(&labels);
    }
    write_head(w, "vllm:engine_sleep_state", "gauge", "Whether the model is loaded.");
    write_sample(w, "vllm:engine_sleep_state", "sleep_state=\"awake\"", info != NULL);
    write_sample(w, "vllm:engine_sleep_state", "sleep_state=\"weights_offloaded\"", 0);
    write_sample(w, "vllm:engine_sleep_state", "sleep_state=\"discard_all\"", info == NULL);
}

static void write_token_counts(struct writer *w, const struct engine_status *s) {
    double computed = (double)s->counters.computed_tokens,
           cached = (double)s->counters.cached_tokens;
    double prompt = computed + cached;
    write_single(w, "vllm:prompt_tokens_total", "counter", "Prompt tokens, cached ones included.",
                 prompt);
    write_single(w, "vllm:prompt_tokens_cached_total", "counter", "Prompt tokens not computed.",
                 cached);
    write_head(w, "vllm:prompt_tokens_by_source_total", "counter", "Prompt tokens by source.");
    write_sample(w, "vllm:prompt_tokens_by_source_total", "source=\"local_compute\"", computed);
    write_sample(w, "vllm:prompt_tokens_by_source_total", "source=\"local_cache_hit\"", cached);
    write_single(w, "vllm:generation_tokens_total", "counter", "Generated tokens.",
                 (double)s->counters.generation_tokens);
    write_single(w, "vllm:prefix_cache_queries_total", "counter",
                 "Prompt tokens looked up in retained conversations.", prompt);
    write_single(w, "vllm:prefix_cache_hits_total", "counter",
                 "Prompt tokens found in retained conversations.", cached);
    write_single(w, "vllm:gpu_prefix_cache_queries_total", "counter",
                 "Older name of prefix_cache_queries.", prompt);
    write_single(w, "vllm:gpu_prefix_cache_hits_total", "counter",
                 "Older name of prefix_cache_hits.", cached);
    write_single(w, "vllm:gpu_prefix_cache_hit_rate", "gauge", "Hits per query since the start.",
                 prompt > 0 ? cached / prompt : 0);
    write_hist(w, "vllm:iteration_tokens_total", "Tokens per engine step.",
               &s->counters.iteration_tokens);
}

/* Writes metrics that readers of vLLM's expect and that this server does not have. */
static void write_absent(struct writer *w) {
    static const char *const names[] = {
        "vllm:external_prefix_cache_queries_total",
        "vllm:external_prefix_cache_hits_total",
        "vllm:mm_cache_queries_total",
        "vllm:mm_cache_hits_total",
        "vllm:corrupted_requests_total",
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        write_single(w, names[i], "counter", "Always 0: not a part of this server.", 0);
}

/* Routers send requests where their adapter is in use already. */
static void write_adapter_names(struct writer *w, const struct stats_model *model) {
    static const char name[] = "vllm:lora_requests_info";
    const bool any = model->info && (model->adapter_count || model->info->loads_adapters);
    const char *comma = "";
    struct buf labels;
    buf_open(&labels, ENGINE_ADAPTERS_MAX * ENGINE_ADAPTER_NAME + 128);
    buf_fmt(&labels, "max_lora=\"%d\",waiting_lora_adapters=\"\",running_lora_adapters=\"",
            any ? model->info->max_adapters : 0);
    for (int i = 0; i < model->adapter_count; i++) {
        if (!model->adapters[i].users) continue;
        buf_fmt(&labels, "%s%s", comma, model->adapters[i].name);
        comma = ",";
    }
    buf_char(&labels, '"');
    write_head(w, name, "gauge", "LoRA adapters that requests use now, of all replicas; always 0.");
    if (!labels.failed) write_sample(w, name, labels.data, 0);
    buf_close(&labels);
}

static const char *const reject_names[STATS_REJECTS] = {
#define X(name, label) label,
    STATS_REJECT_MAP(X)
#undef X
};

static void write_finished(struct writer *w, const struct stats_requests *of,
                           const struct engine_status *s) {
    write_head(w, "vllm:request_success_total", "counter", "Finished requests by reason.");
#define X(name, label)                                                                             \
    write_sample(w, "vllm:request_success_total", "finished_reason=\"" label "\"",                 \
                 (double)of->finished[ENGINE_FINISH_##name]);
    ENGINE_FINISH_MAP(X)
#undef X
    write_single(w, "vllm:num_preemptions_total", "counter", "Always 0: reservations are exact.",
                 (double)s->counters.preemptions);
    write_absent(w);
}

static void write_rejected(struct writer *w, const uint64_t *rejected) {
    write_head(w, "keepd_requests_rejected_total", "counter", "Requests rejected before any work.");
    for (int i = 0; i < STATS_REJECTS; i++) {
        char label[48];
        snprintf(label, sizeof label, "reason=\"%s\"", reject_names[i]);
        write_sample(w, "keepd_requests_rejected_total", label, (double)rejected[i]);
    }
}

static void write_hists(struct writer *w, const struct stats_requests *of) {
    static const struct {
        const char *name, *help;
        size_t offset;
    } rows[] = {
#define ROW(name, help, member) {name, help, offsetof(struct stats_requests, member)}
        ROW("vllm:time_to_first_token_seconds", "From arrival to the first token.", ttft),
        ROW("vllm:inter_token_latency_seconds", "Between tokens of one request.", inter_token),
        ROW("vllm:request_time_per_output_token_seconds", "Mean per request after the first token.",
            per_output_token),
        ROW("vllm:e2e_request_latency_seconds", "From arrival to the last token.", e2e),
        ROW("vllm:request_queue_time_seconds", "Waiting for admission.", queue),
        ROW("vllm:request_inference_time_seconds", "From admission to the last token.", inference),
        ROW("vllm:request_prefill_time_seconds", "From admission to the first token.", prefill),
        ROW("vllm:request_decode_time_seconds", "From the first token to the last.", decode),
        ROW("vllm:request_prompt_tokens", "Prompt tokens per request.", prompt_tokens),
        ROW("vllm:request_generation_tokens", "Generated tokens per request.", generation_tokens),
        ROW("vllm:request_max_num_generation_tokens", "Most tokens a request could get.",
            max_tokens),
        ROW("vllm:request_params_max_tokens", "max_tokens of requests, defaults included.",
            max_tokens),
        ROW("vllm:request_prefill_kv_computed_tokens", "Prompt tokens computed per request.",
            computed_tokens),
        ROW("vllm:request_params_n", "Choices per request.", params_n),
        ROW("vllm:request_num_preemptions", "Always 0: reservations are exact.", preemptions),
#undef ROW
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        write_hist(w, rows[i].name, rows[i].help,
                   (const struct hist *)((const char *)of + rows[i].offset));
}

static void write_keepd(struct writer *w, const struct engine_status *s) {
    const struct {
        const char *name, *type, *help;
        double value;
    } rows[] = {
        {"keepd_pages_total", "gauge", "Pages in the pool of each rank.", (double)s->pages_total},
        {"keepd_pages_used", "gauge", "Pages in use, running and retained, on the fullest rank.",
         (double)s->pages_used},
        {"keepd_pages_reserved", "gauge", "Pages of each rank reserved for running requests.",
         (double)s->pages_reserved},
        {"keepd_pages_retained", "gauge", "Pages of retained conversations.",
         (double)s->pages_retained},
        {"keepd_pages_superseded", "gauge",
         "Retained pages of superseded conversations, which are evicted first.",
         (double)s->pages_superseded},
        {"keepd_pages_pinned", "gauge",
         "Retained pages of pinned conversations, which make no room for others.",
         (double)s->pages_pinned},
        {"keepd_tokens_retained", "gauge",
         "Tokens of retained conversations; the list of their numbers counts as retained memory.",
         (double)s->tokens_retained},
        {"keepd_entries_kept", "gauge",
         "Cached entries of running requests and of conversations' last turns.",
         (double)s->entries_kept},
        {"keepd_entries_superseded", "gauge",
         "Cached entries of superseded conversations, which are evicted first.",
         (double)s->entries_superseded},
        {"keepd_entries_evicted_total", "counter", "Entries evicted.", (double)s->entries_evicted},
        {"keepd_rank_cap_hits_total", "counter",
         "Evictions (or their layers, where layers compete separately) in which kv-rank-cap "
         "limited a rank.",
         (double)s->rank_cap_hits},
        {"keepd_conversations", "gauge", "Retained conversations.", s->conversations},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        write_single(w, rows[i].name, rows[i].type, rows[i].help, rows[i].value);
#define X(name, metric, help)                                                                      \
    if (metric) write_single(w, metric, "counter", help, (double)s->counters.name);
    ENGINE_COUNTER_MAP(X)
#undef X
    write_head(w, "keepd_conversation_lost_total", "counter",
               "Requests that could have continued a conversation and did not, by reason.");
    for (int i = 0; i < ENGINE_MISS_COUNT; i++) {
        char label[64];
        snprintf(label, sizeof label, "reason=\"%s\"", engine_miss_name((enum engine_miss)i));
        write_sample(w, "keepd_conversation_lost_total", label,
                     (double)s->counters.conversation_lost[i]);
    }
    write_hist(w, "keepd_eviction_seconds", "Time per eviction.", &s->counters.eviction_seconds);
    write_hist(w, "keepd_mask_seconds", "Time of a step for the masks of constrained answers.",
               &s->counters.mask_seconds);
}

/* Writes the counts of the state directory. All replicas share one, so they are in the first
 * replica's status. */
static void write_state_counts(struct writer *w, const struct engine_status *s) {
    write_single(w, "keepd_conversations_on_disk", "gauge", "Conversations in the state directory.",
                 s->conversations_on_disk);
    write_single(w, "keepd_state_bytes", "gauge", "Size of the state directory.",
                 (double)s->state_bytes);
    write_single(w, "keepd_state_written_total", "counter", "Conversations written to disk.",
                 (double)s->state_written);
    write_single(w, "keepd_state_refused_total", "counter",
                 "State files that were damaged or forged.", (double)s->state_refused);
}

static void write_process(struct writer *w, const struct stats_input *input) {
    write_single(w, "keepd_queue_tokens", "gauge", "Prompt tokens of waiting requests, reserved.",
                 (double)input->queue_tokens);
    write_single(w, "keepd_picture_bytes", "gauge",
                 "Decoded pictures of requests that wait or run, ready to be encoded.",
                 (double)input->picture_bytes);
    write_single(w, "keepd_connections", "gauge", "Open client connections.", input->connections);
    write_single(w, "keepd_connections_accepted_total", "counter", "Client connections accepted.",
                 (double)input->connections_total);
    write_single(w, "process_start_time_seconds", "gauge", "Start of the process, unix time.",
                 (double)input->start_seconds);
    if (input->resident_bytes > 0)
        write_single(w, "process_resident_memory_bytes", "gauge", "Resident memory.",
                     (double)input->resident_bytes);
}

static int compare_tenant_names(const void *a, const void *b) {
    const struct key *const *x = a, *const *y = b;
    return strcmp((*x)->settings.name, (*y)->settings.name);
}

/* Collects the keys that have names, sorted by name; returns how many. */
static int named_keys(const struct keys *keys, const struct key *named[KEY_NAMES_MAX]) {
    int count = 0;
    for (size_t i = 0; i < keys->count && count < KEY_NAMES_MAX; i++)
        if (keys->items[i].settings.name[0]) named[count++] = &keys->items[i];
    qsort(named, (size_t)count, sizeof *named, compare_tenant_names);
    return count;
}

/* Returns the sum of the count at `offset` in struct key, over all keys with the same name. Moves
 * *i to the next name. */
static double sum_of_name(const struct key *const *named, int count, size_t offset, int *i) {
    const struct key *const *first = &named[*i];
    double sum = 0;
    for (; *i < count && compare_tenant_names(first, &named[*i]) == 0; ++*i)
        sum += (double)*(const uint64_t *)((const char *)named[*i] + offset);
    return sum;
}

/* Writes the counts of each tenant, that is of all keys with one name. */
static void write_tenants(struct writer *w, const struct keys *keys) {
    static const struct {
        const char *name, *type, *help;
        size_t offset;
    } rows[] = {
#define ROW(name, type, help, member) {name, type, help, offsetof(struct key, member)}
        ROW("keepd_tenant_requests_active", "gauge", "Requests that wait or run, by key name.",
            active),
        ROW("keepd_tenant_requests_total", "counter", "Accepted requests by key name.", requests),
        ROW("keepd_tenant_requests_rejected_total", "counter",
            "Requests beyond the key's rate or number at once, by key name.", rejected),
        ROW("keepd_tenant_prompt_tokens_total", "counter",
            "Prompt tokens of ended requests, cached ones included, by key name.", prompt_tokens),
        ROW("keepd_tenant_generation_tokens_total", "counter",
            "Generated tokens of ended requests by key name.", generation_tokens),
#undef ROW
    };
    const struct key *named[KEY_NAMES_MAX];
    int count = keys ? named_keys(keys, named) : 0;
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
        write_head(w, rows[r].name, rows[r].type, rows[r].help);
        for (int i = 0; i < count;) {
            char label[KEY_NAME_MAX + 16];
            snprintf(label, sizeof label, "tenant=\"%s\"", named[i]->settings.name);
            write_sample(w, rows[r].name, label, sum_of_name(named, count, rows[r].offset, &i));
        }
    }
}

/* Writes the counts of spans, in requests: each request counts as one trace. */
static void write_span_counts(struct writer *w, const struct otlp_counts *counts) {
    static const char dropped[] = "keepd_traces_dropped_total";
    write_head(w, "keepd_traces_exported_total", "counter",
               "Requests whose spans the collector took.");
    write_sample(w, "keepd_traces_exported_total", NULL, (double)counts->exported);
    write_head(w, dropped, "counter",
               "Requests whose spans were dropped: queue_full (no room, or too large) or "
               "collector (refused, or not taken before the end).");
    write_sample(w, dropped, "reason=\"queue_full\"", (double)counts->full);
    write_sample(w, dropped, "reason=\"collector\"", (double)counts->refused);
}

static void write_model_counts(struct writer *w, const struct stats_model *model) {
    write_single(w, "keepd_model_loaded", "gauge", "Whether the model is loaded, 0 or 1.",
                 model->info != NULL);
    write_single(w, "keepd_model_memory_bytes", "gauge",
                 "The most memory that the model takes while it is loaded; 0: unknown.",
                 (double)model->memory_bytes);
    write_single(w, "keepd_model_requests_waiting", "gauge",
                 "Requests that wait until their model is loaded.", model->waiting);
    write_single(w, "keepd_model_loads_total", "counter", "Loads of the model.",
                 (double)model->loads);
    write_single(w, "keepd_model_unloads_total", "counter",
                 "Times that the model made room for others, or was idle for too long.",
                 (double)model->unloads);
    write_single(w, "keepd_model_load_failures_total", "counter",
                 "Loads and checks of the model that failed.", (double)model->failures);
}

static void write_adapter_counts(struct writer *w, const struct stats_model *model) {
    static const char total[] = "keepd_adapter_requests_total";
    int64_t bytes = 0;
    for (int i = 0; i < model->adapter_count; i++) bytes += model->adapters[i].bytes;
    write_single(w, "keepd_adapters", "gauge", "LoRA adapters that are loaded.",
                 model->adapter_count);
    write_single(w, "keepd_adapter_bytes", "gauge",
                 "Memory of the numbers of loaded adapters, on each replica.", (double)bytes);
    write_head(w, total, "counter", "Requests by adapter, while it is loaded.");
    for (int i = 0; i < model->adapter_count; i++) {
        char label[ENGINE_ADAPTER_NAME + 16];
        snprintf(label, sizeof label, "adapter=\"%s\"", model->adapters[i].name);
        write_sample(w, total, label, (double)model->adapters[i].requests);
    }
}

static void write_replica(struct writer *w, const struct stats_input *input,
                          const struct stats_model *model, int replica) {
    const struct stats_requests *requests = &model->stats->replicas[replica];
    const struct engine_status *status = &model->statuses[replica];
    buf_clear(&w->labels);
    write_label(&w->labels, "model_name", model->name);
    buf_fmt(&w->labels, ",engine=\"%d\"", replica);
    if (w->labels.failed) return;
    w->family_count = 0;
    write_requests(w, status);
    write_cache(w, model->info, status);
    write_token_counts(w, status);
    write_finished(w, requests, status);
    write_adapter_names(w, model);
    write_hists(w, requests);
    write_keepd(w, status);
    if (replica > 0) return;
    write_model_counts(w, model);
    write_adapter_counts(w, model);
    write_state_counts(w, status);
    if (model != input->models) return;
    write_rejected(w, input->rejected);
    write_tenants(w, input->keys);
    write_span_counts(w, &input->spans);
    write_process(w, input);
}

void stats_render(struct buf *out, const struct stats_input *input) {
    struct writer w = {.first = true};
    int families = 0;
    buf_open(&w.labels, 1024);
    for (int i = 0; i < input->model_count; i++) {
        for (int k = 0; k < input->models[i].stats->replica_count; k++) {
            write_replica(&w, input, &input->models[i], k);
            if (w.first) families = w.family_count;
            w.first = false;
        }
    }
    out->failed |= w.labels.failed;
    for (int i = 0; i < families; i++) {
        out->failed |= w.families[i].failed;
        if (!w.families[i].failed) buf_add(out, w.families[i].data, w.families[i].size);
        buf_close(&w.families[i]);
    }
    buf_close(&w.labels);
}
