/* The load of this instance, for load balancers: a response header on request (ORCA, as vLLM sends
 * it) and GET /v1/loads (SGLang's form, core fields). */
#include <inttypes.h>
#include <stdio.h>
#include <strings.h>

#include "server/loop.h"

void load_add_header(struct exchange *ex, struct MHD_Response *response) {
    const char *format = MHD_lookup_connection_value(ex->connection, MHD_HEADER_KIND,
                                                     "endpoint-load-metrics-format");
    struct engine_status s;
    char value[200];
    int status = ex->answer.status;
    if (!format || !ex->route || ex->route->act) return;
    if (status == 401 || status == 403) return; /* not a client of this server */
    if (!ex->model->engine) return;
    engine_status(ex->model->engine, &s);
    const struct engine_info *info = ex->model->rules.info;
    double places = (double)info->max_num_seqs * info->replicas, used = stats_cache_usage(&s);
    double busy = places > 0 ? (s.running + s.waiting) / places : 0; /* above 1, some wait */
    if (strcasecmp(format, "text") == 0)
        snprintf(value, sizeof value,
                 "TEXT application_utilization=%.6g, named_metrics.kv_cache_usage_perc=%.6g, "
                 "named_metrics.num_requests_waiting=%d",
                 busy, used, s.waiting);
    else if (strcasecmp(format, "json") == 0)
        snprintf(value, sizeof value,
                 "JSON {\"application_utilization\": %.6g, \"named_metrics\": "
                 "{\"kv_cache_usage_perc\": %.6g, \"num_requests_waiting\": %d}}",
                 busy, used, s.waiting);
    else
        return;
    MHD_add_response_header(response, "endpoint-load-metrics", value);
}
