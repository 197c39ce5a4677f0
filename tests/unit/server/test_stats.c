#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "server/stats.h"

#define SECOND 1000000000ll

static struct engine_info info = {.replicas = 1, .page_slots = 16, .kv_dtype = "bf16"};
static struct stats stats;
static struct buf out;

static uint64_t rejected[STATS_REJECTS];

static void open_stats(void) {
    stats_open(&stats, 4, 1000);
    buf_open(&out, 1 << 20);
}

static void close_stats(void) {
    stats_close(&stats);
    buf_close(&out);
}

TestSuite(stats, .init = open_stats, .fini = close_stats);

static void render(const char *model, const struct engine_status *status) {
    stats.replica_count = info.replicas;
    const struct stats_model served = {
        .name = model, .stats = &stats, .info = &info, .statuses = status};
    struct stats_input input = {.models = &served, .model_count = 1, .rejected = rejected};
    stats_render(&out, &input);
    cr_assert_not(out.failed);
}

static void check_line(const char *line) {
    cr_assert(strstr(out.data, line), "missing: %s", line);
}

static void finish(enum engine_finish how, uint32_t count, int64_t end) {
    struct engine_choice choice = {0};
    struct engine_job job = {.request = {.prompt_count = 30, .max_tokens = 100},
                             .choice = &choice,
                             .choice_count = 1,
                             .cached_tokens = 10,
                             .queued_ns = SECOND,
                             .admitted_ns = 2 * SECOND,
                             .first_token_ns = 4 * SECOND,
                             .finished_ns = end};
    atomic_store(&job.choice[0].finish, how);
    atomic_store(&job.choice[0].token_count, count);
    stats_finished(&stats, &job, SECOND / 2);
}

Test(stats, a_finished_request) {
    struct engine_status status = {0};
    stats_submitted(&stats, SECOND);
    finish(ENGINE_FINISH_STOP, 5, 8 * SECOND);
    render("m", &status);
    check_line(
        "\nvllm:request_success_total{model_name=\"m\",engine=\"0\",finished_reason=\"stop\"} 1\n");
    check_line("\nvllm:request_success_total{model_name=\"m\",engine=\"0\",finished_reason="
               "\"abort\"} 0\n");
    check_line("\nvllm:e2e_request_latency_seconds_sum{model_name=\"m\",engine=\"0\"} 7.5\n");
    check_line("\nvllm:request_queue_time_seconds_sum{model_name=\"m\",engine=\"0\"} 1\n");
    check_line("\nvllm:request_prefill_time_seconds_sum{model_name=\"m\",engine=\"0\"} 2\n");
    check_line("\nvllm:request_decode_time_seconds_sum{model_name=\"m\",engine=\"0\"} 4\n");
    check_line("\nvllm:request_inference_time_seconds_sum{model_name=\"m\",engine=\"0\"} 6\n");
    check_line(
        "\nvllm:request_time_per_output_token_seconds_sum{model_name=\"m\",engine=\"0\"} 1\n");
    check_line("\nvllm:request_prompt_tokens_bucket{model_name=\"m\",engine=\"0\",le=\"20\"} 0\n"
               "vllm:request_prompt_tokens_bucket{model_name=\"m\",engine=\"0\",le=\"50\"} 1\n");
    check_line("\nvllm:request_prompt_tokens_bucket{model_name=\"m\",engine=\"0\",le=\"1000\"} 1\n"
               "vllm:request_prompt_tokens_bucket{model_name=\"m\",engine=\"0\",le=\"+Inf\"} 1\n");
    check_line("\nvllm:request_prefill_kv_computed_tokens_sum{model_name=\"m\",engine=\"0\"} 20\n");
}

Test(stats, a_request_that_was_never_admitted) {
    struct engine_choice choice = {0};
    struct engine_job job = {.choice = &choice,
                             .choice_count = 1,
                             .request = {.prompt_count = 3},
                             .queued_ns = SECOND,
                             .finished_ns = 2 * SECOND};
    atomic_store(&job.choice[0].finish, ENGINE_FINISH_ABORT);
    stats_submitted(&stats, SECOND);
    stats_finished(&stats, &job, SECOND);
    cr_assert_eq(stats.replicas[0].finished[ENGINE_FINISH_ABORT], 1);
    cr_assert_eq(hist_count(&stats.replicas[0].queue), 0);
    cr_assert_eq(hist_count(&stats.replicas[0].e2e), 1);
}

Test(stats, tokens) {
    const struct engine_job job = {0};
    stats_tokens(&stats, &job, 1, 0, 0, SECOND / 2);
    stats_tokens(&stats, &job, 4, 0, SECOND / 2, SECOND);
    stats_tokens(&stats, &job, 0, 0, SECOND, 9 * SECOND);
    cr_assert_eq(hist_count(&stats.replicas[0].ttft), 1);
    cr_assert_float_eq(stats.replicas[0].ttft.sum, 0.5, 1e-9);
    cr_assert_eq(hist_count(&stats.replicas[0].inter_token), 4);
    cr_assert_float_eq(stats.replicas[0].inter_token.sum, 0.5, 1e-9);
    /* Three tokens at once, the first of them made a quarter of a second before. */
    struct engine_job late = {.first_token_ns = 3 * SECOND / 4};
    stats_tokens(&stats, &late, 3, 0, 0, SECOND);
    cr_assert_eq(hist_count(&stats.replicas[0].inter_token), 6);
    cr_assert_float_eq(stats.replicas[0].inter_token.sum, 0.75, 1e-9);
}

Test(stats, status) {
    struct engine_status status = {.running = 3,
                                   .waiting = 2,
                                   .pages_total = 200,
                                   .pages_reserved = 50,
                                   .pages_used = 90,
                                   .pages_retained = 40,
                                   .counters = {.computed_tokens = 750, .cached_tokens = 250},
                                   .entries_evicted = 1ull << 53,
                                   .conversations = 7};
    render("m", &status);
    check_line("\nvllm:num_requests_running{model_name=\"m\",engine=\"0\"} 3\n");
    check_line("\nvllm:num_requests_waiting{model_name=\"m\",engine=\"0\"} 2\n");
    check_line("\nvllm:kv_cache_usage_perc{model_name=\"m\",engine=\"0\"} 0.25\n");
    check_line("\nvllm:gpu_prefix_cache_hit_rate{model_name=\"m\",engine=\"0\"} 0.25\n");
    check_line("\nvllm:prompt_tokens_by_source_total{model_name=\"m\",engine=\"0\",source="
               "\"local_compute\"} 750\n");
    check_line("\nvllm:prompt_tokens_total{model_name=\"m\",engine=\"0\"} 1000\n");
    check_line("block_size=\"16\",num_gpu_blocks=\"200\",cache_dtype=\"bf16\"} 1\n");
    check_line("\nkeepd_pages_used{model_name=\"m\",engine=\"0\"} 90\n");
    check_line("\nkeepd_pages_retained{model_name=\"m\",engine=\"0\"} 40\n");
    check_line("\nkeepd_conversations{model_name=\"m\",engine=\"0\"} 7\n");
    check_line("\n# TYPE keepd_pages_total gauge\n");
}

/* Every row of the lists in engine_stats.h and stats.h, with the value that is its own. */
Test(stats, lists_are_shown_whole) {
    struct engine_status status = {0};
    char line[160];
    uint64_t value = 1000;
#define X(name, metric, help) status.counters.name = value++;
    ENGINE_COUNTER_MAP(X)
#undef X
    for (int i = 0; i < ENGINE_MISS_COUNT; i++) status.counters.conversation_lost[i] = value++;
    for (int i = 0; i < STATS_REJECTS; i++) rejected[i] = value++;
    render("m", &status);
    value = 1000;
#define X(name, metric, help)                                                                      \
    snprintf(line, sizeof line, "\n%s{model_name=\"m\",engine=\"0\"} %d\n", metric ? metric : "",  \
             (int)value++);                                                                        \
    if (metric) check_line(line);
    ENGINE_COUNTER_MAP(X)
#undef X
    for (int i = 0; i < ENGINE_MISS_COUNT; i++) {
        const char *name = engine_miss_name((enum engine_miss)i);
        cr_assert_not_null(name);
        snprintf(line, sizeof line, "reason=\"%s\"} %d\n", name, (int)value++);
        check_line(line);
    }
    for (int i = 0; i < STATS_REJECTS; i++) {
        snprintf(line, sizeof line, "engine=\"0\",reason=\"%s\"} %d\n",
                 (const char *[]){
#define X(name, label) label,
                     STATS_REJECT_MAP(X)
#undef X
                 }[i],
                 (int)value++);
        check_line(line);
    }
    cr_assert_null(strstr(out.data, "(null)"));
}

Test(stats, label_values_are_escaped) {
    struct engine_status status = {0};
    render("a\"b\\c\nd", &status);
    check_line("{model_name=\"a\\\"b\\\\c\\nd\",engine=\"0\"}");
}

Test(stats, large_counters_keep_their_digits) {
    struct engine_status status = {.entries_evicted = 123456789012345};
    render("m", &status);
    check_line("keepd_entries_evicted_total{model_name=\"m\",engine=\"0\"} 123456789012345\n");
}

Test(stats, retry_follows_the_rate_of_finishing) {
    cr_assert_eq(stats_retry_ms(&stats), 100);
    for (int i = 0; i < 100; i++) stats_submitted(&stats, SECOND);
    for (int i = 1; i < 100; i++) finish(ENGINE_FINISH_STOP, 1, (int64_t)i * 2 * SECOND);
    cr_assert(stats_retry_ms(&stats) > 1900 && stats_retry_ms(&stats) <= 2000);
    finish(ENGINE_FINISH_STOP, 1, 100000 * SECOND);
    cr_assert_eq(stats_retry_ms(&stats), 30000);
}

/* A long idle time between two requests of two seconds each. */
Test(stats, retry_does_not_count_idle_time) {
    for (int i = 0; i < 100; i++) {
        int64_t start = (int64_t)i * 40000 * SECOND;
        stats_submitted(&stats, start + SECOND);
        finish(ENGINE_FINISH_STOP, 1, start + 3 * SECOND);
    }
    cr_assert(stats_retry_ms(&stats) > 1900 && stats_retry_ms(&stats) <= 2000);
}

static int count_of(const char *text) {
    int count = 0;
    for (const char *at = out.data; (at = strstr(at, text)) != NULL; at++) count++;
    return count;
}

/* Every metric once, its replicas together; what is the process's, of none of them in particular.
 */
Test(stats, replicas_are_engines) {
    struct engine_status statuses[3] = {
        {.running = 1, .state_bytes = 5}, {.running = 2}, {.running = 3}};
    struct engine_choice choice = {0};
    struct engine_job job = {.choice = &choice, .choice_count = 1, .replica = 2};
    atomic_store(&choice.finish, ENGINE_FINISH_STOP);
    stats_submitted(&stats, SECOND);
    stats_finished(&stats, &job, SECOND);
    info.replicas = 3;
    render("m", statuses);
    info.replicas = 1;
    check_line("# TYPE vllm:num_requests_running gauge\n"
               "vllm:num_requests_running{model_name=\"m\",engine=\"0\"} 1\n"
               "vllm:num_requests_running{model_name=\"m\",engine=\"1\"} 2\n"
               "vllm:num_requests_running{model_name=\"m\",engine=\"2\"} 3\n# HELP");
    check_line("vllm:request_success_total{model_name=\"m\",engine=\"0\",finished_reason="
               "\"stop\"} 0\n");
    check_line("vllm:request_success_total{model_name=\"m\",engine=\"2\",finished_reason="
               "\"stop\"} 1\n");
    check_line("\nkeepd_state_bytes{model_name=\"m\",engine=\"0\"} 5\n# HELP");
    check_line("\nkeepd_connections{model_name=\"m\",engine=\"0\"} 0\n# HELP");
    cr_assert_eq(count_of("# TYPE vllm:e2e_request_latency_seconds "), 1);
    cr_assert_eq(count_of("\nvllm:e2e_request_latency_seconds_sum{"), 3);
    cr_assert_eq(count_of("\nkeepd_connections{"), 1);
}
